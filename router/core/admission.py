"""Which requests are refused at once, since they would be refused later."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Literal

from kvrelay.errors import ResourceExhausted
from router.core.queueing.fair_queue import FairQueue, Share
from router.core.throughput import Throughput

Rejection = Literal["queue_full", "deadline", "quarantined"]
MARGIN = 1.25  # by which an estimate may fall short
RETRY_AFTER_S = (0.5, 60.0)  # least and most that a client is told
JITTER = 0.25  # of it, in both directions
_GOLDEN = 0.6180339887498949  # its multiples lie evenly in [0, 1), whatever their number


class Admission:
    """Bounds the queue, by number and by time.

    A request that would not be through by its deadline is refused when it comes: what it would have
    cost is spent on others, so the rate of answers in time stays where it is when more is asked for
    than can be served. Its wait is estimated from those that go before it and the rate at which the
    queue was left lately; what it takes after that, from the last answers. Where too little was
    measured, nobody is refused for time.
    """

    def __init__(self, queue: FairQueue, throughput: Throughput, max_queue: int) -> None:
        self.rejected: Counter[Rejection] = Counter()
        self._queue = queue
        self._throughput = throughput
        self._max_queue = max_queue
        self._answers = count(1)

    def check_room(self, share: Share, priority: int) -> str | None:
        """The request that has to go if this one comes, or None. Raises ResourceExhausted when that
        is this one.
        """
        if len(self._queue) < self._max_queue:
            return None
        displaced = self._queue.overflow(share, priority)
        if displaced is None:
            raise self.refusal(
                "queue_full",
                f"the queue of {self._max_queue} requests is full",
                self._wait(share, priority),
            )
        return displaced

    def check_time(self, share: Share, priority: int, max_tokens: int, time_left: float) -> None:
        """Raises ResourceExhausted for a request that would not be served in time."""
        wait = self._wait(share, priority)
        if wait is None:
            return
        service = self._throughput.service_s(max_tokens)
        if (wait + service) * MARGIN > time_left:
            text = (
                f"it would wait {wait:.1f} s and take {service:.1f} s, and its deadline is in "
                f"{time_left:.1f} s"
            )
            raise self.refusal("deadline", text, wait)

    def too_late(self, max_tokens: int, time_left: float) -> bool:
        """Whether one whose turn has come would not be through in time."""
        return self._throughput.service_s(max_tokens) > time_left

    def refusal(self, reason: Rejection, text: str, wait: float | None) -> ResourceExhausted:
        """With a delay after which those that wait now have been served; no two are told the
        same.
        """
        self.rejected[reason] += 1
        least, most = RETRY_AFTER_S
        delay = min(most, max(least, least if wait is None else wait))
        jitter = 1 + JITTER * (2 * (next(self._answers) * _GOLDEN % 1) - 1)
        return ResourceExhausted(text, retry_after_s=delay * jitter)

    def _wait(self, share: Share, priority: int) -> float | None:
        """Seconds in the queue for one that comes now. None if nothing waits, or nothing is
        known.
        """
        rate, tokens = self._throughput.per_second, max(1.0, self._throughput.tokens)
        wait = None
        if rate is not None and len(self._queue):
            wait = (self._queue.ahead(share, priority, tokens) + 1) / rate
        if share.capped and share.tenant.max_running and self._throughput.seconds:
            own = (share.waiting + 1) * self._throughput.seconds / share.tenant.max_running
            wait = max(own, wait or 0.0)
        return wait
