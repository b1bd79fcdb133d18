"""Which pool the queue waits for: a mean over the last seconds. Pure."""

from __future__ import annotations

import math

# Time constant of the mean. When both pools are near their limits, the first request in the queue
# waits for a batch slot and for a prefill worker by turns of some milliseconds. Scaling policies
# must see both.
MEAN_S = 5.0
# A pool for which the queue waits in a smaller share of the time is large enough.
MINOR = 0.1


class Bottleneck:
    """The share of the waiting time in which decode workers had room, and prefill workers did
    not.
    """

    def __init__(self) -> None:
        # Seconds of waiting, and the part for prefill. Both fade with time.
        self._waited = self._waited_for_prefill = 0.0
        self._waits = self._for_prefill = False
        self._since = 0.0

    def note(self, waits: bool, for_prefill: bool, now: float) -> None:
        """Records whether requests wait from now on, and whether they wait for prefill workers."""
        kept = math.exp(min(0.0, self._since - now) / MEAN_S)
        gained = MEAN_S * (1 - kept)
        self._waited = self._waited * kept + gained * self._waits
        self._waited_for_prefill = self._waited_for_prefill * kept + gained * (
            self._waits and self._for_prefill
        )
        self._waits, self._for_prefill, self._since = waits, for_prefill, now

    @property
    def prefill_share(self) -> float:
        """The share, 0 to 1, where a share of one pool below MINOR is 0. Without a past it is the
        present state.
        """
        if self._waited > 0:
            share = self._waited_for_prefill / self._waited
            return 0.0 if share < MINOR else 1.0 if share > 1 - MINOR else share
        return float(self._for_prefill)
