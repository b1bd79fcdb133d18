"""Admission control: rejects requests at once that would fail later."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Literal

from kvrelay.errors import ResourceExhausted
from router.core.queueing.fair_queue import FairQueue, Share
from router.core.throughput import Throughput

Rejection = Literal["queue_full", "deadline", "quarantined"]
# Safety factor on time estimates.
MARGIN = 1.25
# Shortest and longest retry delay sent to a client.
RETRY_AFTER_S = (0.5, 60.0)
# Relative jitter of the retry delay, in both directions.
JITTER = 0.25
# Fractional parts of its multiples are evenly spread over [0, 1).
_GOLDEN = 0.6180339887498949


class Admission:
    """Bounds the queue by number and by time.

    A request that would miss its deadline is rejected on arrival. The saved capacity serves other
    requests, so the rate of answers in time stays constant under overload. The estimated wait comes
    from the requests ahead in the queue and the recent rate of departures; the service time comes
    from the last answers. Without enough measurements, deadline-based rejection is off.
    """

    def __init__(self, queue: FairQueue, throughput: Throughput, max_queue: int) -> None:
        self.rejected: Counter[Rejection] = Counter()
        self._queue = queue
        self._throughput = throughput
        self._max_queue = max_queue
        self._answers = count(1)

    def check_room(self, share: Share, priority: int, requests: int = 1) -> str | None:
        """Returns the request that a new one displaces from a full queue, or None if there is room
        for `requests` new ones. Raises ResourceExhausted if one of these has to go.
        """
        # Some of many requests may find room on workers.
        if not self._queue or len(self._queue) + requests <= self._max_queue:
            return None
        displaced = self._queue.overflow(share, priority)
        if displaced is None:
            text = f"the queue is full with {self._max_queue} requests; retry later"
            if requests > 1:
                text = (
                    f"{requests} choices do not fit into the queue, in which {len(self._queue)} of "
                    f"{self._max_queue} places are taken; ask for fewer choices, or retry later"
                )
            raise self.refusal("queue_full", text, self._wait(share, priority))
        return displaced

    def check_time(
        self, share: Share, priority: int, max_tokens: int | None, time_left: float
    ) -> None:
        """Raises ResourceExhausted for a request that would miss its deadline. `time_left` is in
        seconds.
        """
        wait = self._wait(share, priority)
        if wait is None:
            return
        service = self._throughput.service_s(max_tokens)
        if (wait + service) * MARGIN > time_left:
            text = (
                f"the request would wait {wait:.1f} s and take {service:.1f} s, and its "
                f"deadline is in {max(0.0, time_left):.1f} s; send a later deadline, or retry later"
            )
            raise self.refusal("deadline", text, wait)

    def too_late(self, max_tokens: int | None, time_left: float) -> bool:
        """Whether a request that starts now would miss its deadline. `time_left` is in seconds."""
        return self._throughput.service_s(max_tokens) > time_left

    def refusal(self, reason: Rejection, text: str, wait: float | None) -> ResourceExhausted:
        """Counts a rejection and returns its error. After the error's retry delay, the requests
        that wait now have been served. Jitter gives each client a different delay.
        """
        self.rejected[reason] += 1
        least, most = RETRY_AFTER_S
        delay = min(most, max(least, least if wait is None else wait))
        jitter = 1 + JITTER * (2 * (next(self._answers) * _GOLDEN % 1) - 1)
        return ResourceExhausted(text, retry_after_s=delay * jitter)

    def _wait(self, share: Share, priority: int) -> float | None:
        """Returns the wait in seconds of a request that arrives now. None if the queue is empty or
        the rate is unknown.
        """
        rate, tokens = self._throughput.per_second, max(1.0, self._throughput.tokens)
        wait = None
        if rate is not None and len(self._queue):
            wait = (self._queue.ahead(share, priority, tokens) + 1) / rate
        if share.capped and share.tenant.max_running and self._throughput.seconds:
            own = (share.waiting + 1) * self._throughput.seconds / share.tenant.max_running
            wait = max(own, wait or 0.0)
        return wait
