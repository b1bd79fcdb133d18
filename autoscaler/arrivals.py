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
LEAST_S = 10.0


class Arrivals:
    """Owns the last counts of requests: those that have begun on a worker, and those that wait for
    one. A request that ends in the queue was no work, and is in neither. Nor is one that its
    tenant's limit holds back.

    The rate is the least-squares line through the counts of the last `window_s` seconds. The counts
    of Poisson arrivals vary as much as their mean, so a slope is known up to a standard error. Only
    what exceeds this error counts as a trend. A rising load is expected to rise on; a falling one
    counts as it is now, since it may stop falling.
    """

    def __init__(self, window_s: float, gap_s: float) -> None:
        """`gap_s`: longest time between two calls of `seen` over which counts are compared."""
        self._window_s = window_s
        self._gap_s = gap_s
        # (time, requests so far), oldest first.
        self._counts: deque[tuple[float, int]] = deque()
        # Each router's own counts at the last call: begun, and begun or waiting.
        self._routers: dict[str, tuple[int, int]] = {}

    def seen(self, routers: Sequence[RouterLoad], now: float) -> None:
        """Adds the routers' counts at `now`.

        What happened while nobody looked, or at a router that is new or has started again, is
        unknown. The counts begin anew then.
        """
        if not routers:
            return
        counts = {
            one.router_id: (one.begun, one.begun + one.waiting - one.waiting_at_limit)
            for one in routers
        }
        before, self._routers = self._routers, counts
        is_same = counts.keys() == before.keys() and all(
            begun >= before[name][0] for name, (begun, _) in counts.items()
        )
        if not is_same or not self._counts or now - self._counts[-1][0] > self._gap_s:
            self._counts.clear()
            self._counts.append((now, 0))
            return
        more = sum(total - before[name][1] for name, (_, total) in counts.items())
        self._counts.append((now, self._counts[-1][1] + more))
        while len(self._counts) > 2 and self._counts[1][0] < now - self._window_s:
            self._counts.popleft()

    def rate(self, ahead_s: float = 0.0) -> float | None:
        """Returns the expected requests per second, `ahead_s` seconds after the last call of
        `seen`. None until LEAST_S seconds have been seen.
        """
        if not self._counts:
            return None
        (start, first), (end, last) = self._counts[0], self._counts[-1]
        span = end - start
        if span < LEAST_S:
            return None
        mean, middle = max(0.0, (last - first) / span), (start + end) / 2
        spread = moved = 0.0
        for (since, before), (until, after) in pairwise(self._counts):
            distance = (since + until) / 2 - middle
            spread += (until - since) * distance**2
            moved += (after - before) * distance
        if not spread:
            return mean
        slope, error = moved / spread, math.sqrt(mean / spread)
        if slope >= 0:
            return mean + max(0.0, slope - error) * (end - middle + ahead_s)
        # After a sudden fall, the line ends below the load.
        least = min(mean, self.recent_rate(span / 3) or 0.0)
        return max(mean + min(0.0, slope + error) * (end - middle), least)

    def recent_rate(self, seconds: float) -> float | None:
        """Returns the requests per second of about the last `seconds`, or of the time seen if that
        is shorter. None until LEAST_S seconds have been seen.
        """
        if not self._counts or self._counts[-1][0] - self._counts[0][0] < LEAST_S:
            return None
        end, last = self._counts[-1]
        start, first = next(
            (one for one in reversed(self._counts) if end - one[0] >= seconds), self._counts[0]
        )
        return max(0.0, (last - first) / (end - start))
