"""Whether KV is sooner here from another worker's cache than computed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_LATENCY_S = 0.01  # of asking: a call there, a push back
_FIRST_GUESS = 0.5e9  # bytes per second, until one was measured
_WEIGHT = 0.3  # of the newest measurement


@dataclass(slots=True)
class Worth:
    """Learns both speeds from what happens here."""

    tokens_per_second: float = 0.0  # of computing; 0 until measured
    bytes_per_second: float = _FIRST_GUESS  # of fetching

    def fetching(self, tokens: int, num_bytes: int) -> bool:
        """Before anything was computed nobody knows, and it is fetched."""
        if not tokens:
            return False
        if not self.tokens_per_second:
            return True
        return _LATENCY_S + num_bytes / self.bytes_per_second < tokens / self.tokens_per_second

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens and seconds > 0:
            self.tokens_per_second = _mean(self.tokens_per_second, tokens / seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > _LATENCY_S:
            self.bytes_per_second = _mean(self.bytes_per_second, num_bytes / (seconds - _LATENCY_S))


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
