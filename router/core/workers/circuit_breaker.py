"""A circuit breaker."""

from __future__ import annotations

from dataclasses import dataclass

FORGET_S = 60.0  # closed for that long, it opens as if for the first time


@dataclass(slots=True, eq=False)
class Breaker:
    """closed ─▶ open ─▶ half open: one probe ─▶ closed, or open for twice as long.

    The probe is the first that passes when the time is over; it holds the breaker open behind it
    for as long as before. So one that ends without a verdict is followed by another.
    """

    least_s: float
    most_s: float
    reason: str = ""  # why it is open; empty while it is closed
    until: float = 0.0
    changed_at: float = float("-inf")  # when it opened or closed last
    _hold_s: float = 0.0

    def passes(self, now: float) -> bool:
        return not self.reason or now >= self.until

    def passed(self, now: float) -> None:
        """Something was sent through it."""
        if self.reason:
            self.until = now + self._hold_s

    def open(self, reason: str, now: float) -> float:
        """Opens, or stays open; returns for how many seconds."""
        again = bool(self.reason) or now - self.changed_at < FORGET_S
        self._hold_s = (
            min(self.most_s, 2 * self._hold_s) if again and self._hold_s else self.least_s
        )
        self.reason = reason
        self.until = now + self._hold_s
        self.changed_at = now
        return self._hold_s

    def close(self, now: float) -> None:
        self.reason = ""
        self.changed_at = now
