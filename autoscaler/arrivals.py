"""The rate at which requests arrive, and its trend. Pure: the time is an argument, in monotonic
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from kvrelay.types.control_plane import RouterLoad

# Shortest time that a rate is taken of, in seconds.
_LEAST_S = 5.0


class Arrivals:
    """Owns the last counts of admitted requests.

    The rate is the least-squares line through the counts of the last `window_s` seconds. The counts
    of Poisson arrivals vary as much as their mean, so a slope is known up to a standard error. Only
    what exceeds this error counts as a trend, and only a rising one: a load that falls needs no
    foresight.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # (time, requests so far), oldest first.
        self._counts: deque[tuple[float, int]] = deque()
        # Each router's own count at the last call.
        self._routers: dict[str, int] = {}

    def seen(self, routers: Sequence[RouterLoad], now: float) -> None:
        """Adds the routers' counts at `now`. A router that is new, or that has started again,
        counts from here on.
        """
        total = self._counts[-1][1] if self._counts else 0
        for one in routers:
            before = self._routers.get(one.router_id, one.admitted)
            total += max(0, one.admitted - before)
        self._routers = {one.router_id: one.admitted for one in routers}
        self._counts.append((now, total))
        while len(self._counts) > 2 and self._counts[1][0] < now - self._window_s:
            self._counts.popleft()

    def rate(self, ahead_s: float = 0.0) -> float | None:
        """Returns the expected requests per second, `ahead_s` seconds after the last call of
        `seen`. None until _LEAST_S seconds have been seen.
        """
        if not self._counts:
            return None
        (start, first), (end, last) = self._counts[0], self._counts[-1]
        span = end - start
        if span < _LEAST_S:
            return None
        mean, middle = (last - first) / span, (start + end) / 2
        spread = moved = 0.0
        for (since, before), (until, after) in pairwise(self._counts):
            distance = (since + until) / 2 - middle
            spread += (until - since) * distance**2
            moved += (after - before) * distance
        if not spread:
            return mean
        trend = max(0.0, moved / spread - math.sqrt(mean / spread))
        return mean + trend * (end - middle + ahead_s)

    def recent_rate(self, seconds: float) -> float | None:
        """Returns the requests per second of about the last `seconds`. None if nothing is known."""
        if len(self._counts) < 2:
            return None
        end, last = self._counts[-1]
        start, first = next(
            (one for one in reversed(self._counts) if end - one[0] >= seconds), self._counts[0]
        )
        return (last - first) / (end - start) if end > start else None
