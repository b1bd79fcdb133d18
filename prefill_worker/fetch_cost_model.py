"""The fetch cost model: predicts whether fetching KV from another worker's cache is faster than
computing it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds of a fetch without its bytes: a call to the peer and a push back.
_LATENCY_S = 0.01
# Bytes per second, until the first measurement.
_FIRST_GUESS = 0.5e9
# Weight of the newest measurement.
_WEIGHT = 0.3


@dataclass(slots=True)
class FetchCostModel:
    """Learns the rates of computing and of fetching on this worker."""

    # Rate of computing; 0 until measured.
    tokens_per_second: float = 0.0
    # Rate of fetching.
    bytes_per_second: float = _FIRST_GUESS

    def is_fetch_faster(self, tokens: int, num_bytes: int) -> bool:
        """True if fetching is predicted to be faster, and before the first measurement of
        computing. False for no tokens.
        """
        if not tokens:
            return False
        if not self.tokens_per_second:
            return True
        return _LATENCY_S + num_bytes / self.bytes_per_second < tokens / self.tokens_per_second

    def add_compute(self, tokens: int, seconds: float) -> None:
        """Adds a measurement of computing."""
        if tokens and seconds > 0:
            self.tokens_per_second = _mean(self.tokens_per_second, tokens / seconds)

    def add_fetch(self, num_bytes: int, seconds: float) -> None:
        """Adds a measurement of fetching."""
        if num_bytes and seconds > _LATENCY_S:
            self.bytes_per_second = _mean(self.bytes_per_second, num_bytes / (seconds - _LATENCY_S))


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
