"""The end of a worker's service: which answers a draining worker takes, and how long it stays."""

from __future__ import annotations

import math

from kvrelay.clock import Clock

# A draining worker stays for this long after its last abandoned answer, in seconds. The answer's
# client or router may come back for the rest, which only a worker of the same model version has.
RETURN_S = 3.0


class Drain:
    """A draining worker takes no new answers. It continues answers that have begun until its grace
    is over, because an upgrade may leave no other worker with their model version.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Time at which the grace is over; None before the drain.
        self._ends_at: float | None = None
        self._abandoned_at = -math.inf

    @property
    def begun(self) -> bool:
        """Whether the worker drains."""
        return self._ends_at is not None

    @property
    def over(self) -> bool:
        """Whether the grace is over, so that everything left is handed back."""
        return self._ends_at is not None and self._clock.now() >= self._ends_at

    @property
    def awaits_return(self) -> bool:
        """Whether the rest of an abandoned answer may still be asked for."""
        is_recent = self._clock.now() < self._abandoned_at + RETURN_S
        return self.begun and is_recent and not self.over

    def begin(self, grace_s: float) -> None:
        """Begins the drain. If called again, the earlier end of the grace holds."""
        ends_at = self._clock.now() + grace_s
        self._ends_at = ends_at if self._ends_at is None else min(ends_at, self._ends_at)

    def abandoned(self) -> None:
        """Records that the router, or the loss of its session, ended an answer here."""
        self._abandoned_at = self._clock.now()
