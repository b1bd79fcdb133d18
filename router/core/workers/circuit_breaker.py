"""A circuit breaker with exponential backoff."""

from __future__ import annotations

from dataclasses import dataclass

# A breaker that was closed for this long opens with the shortest duration again.
FORGET_S = 60.0


@dataclass(slots=True, eq=False)
class Breaker:
    """closed ─▶ open ─▶ half open: one probe ─▶ closed, or open for twice as long.

    The first call that passes after the open time is the probe. The probe keeps the breaker open
    for the same time again. So a probe without a result is followed by another probe.
    """

    least_s: float
    most_s: float
    # Reason for being open; empty while closed.
    reason: str = ""
    until: float = 0.0
    # Last time of opening or closing.
    changed_at: float = float("-inf")
    _hold_s: float = 0.0

    def passes(self, now: float) -> bool:
        """Whether a call may pass at `now`."""
        return not self.reason or now >= self.until

    def passed(self, now: float) -> None:
        """Records that a call passed. In half-open state the call becomes the probe."""
        if self.reason:
            self.until = now + self._hold_s

    def open(self, reason: str, now: float) -> float:
        """Opens the breaker, or keeps it open for longer. Returns the duration in seconds."""
        again = bool(self.reason) or now - self.changed_at < FORGET_S
        self._hold_s = (
            min(self.most_s, 2 * self._hold_s) if again and self._hold_s else self.least_s
        )
        self.reason = reason
        self.until = now + self._hold_s
        self.changed_at = now
        return self._hold_s

    def close(self, now: float) -> None:
        """Closes the breaker."""
        self.reason = ""
        self.changed_at = now
