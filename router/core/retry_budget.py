"""How many failed attempts may be followed by another, in all."""

from __future__ import annotations

RATIO = 0.2  # of a retry that each request earns
MOST = 100.0  # retries that can be saved up
FLOOR = 10.0  # retries that a router has when it starts
FLOOR_PER_S = 1.0  # what they grow by again while there are fewer than FLOOR


class RetryBudget:
    """A token bucket that requests fill and retries empty, as in Finagle's RetryBudget and Envoy's
    retry budgets.

    When a cluster is sick, retries by each request for itself multiply the load: five attempts each
    are five times of it. Out of one budget, attempts are at most 1 + RATIO per request in the long
    run, and FLOOR more, which is what lets a quiet cluster fail over: there one lost attempt would
    otherwise find an empty bucket.

    Three things that look like retries do not spend from it, since none of them can become a storm:
    - a worker refused: nothing was done, and the request waits in the queue meanwhile;
    - a worker drains: its requests move once, because somebody asked for it;
    - a worker was lost: each of its requests moves once for this loss, so there are as many moves
      as the lost worker had batch slots, whatever the load, and these batch slots do not work any
      more. A request that is itself what kills workers is stopped by what speaks against it
      (`router.core.poison_detection`), and each by `router.max_attempts`. If moves were paid for,
      the death of one busy worker of a small cluster would empty the budget and fail requests that
      nothing is wrong with.
    """

    def __init__(self) -> None:
        self._balance = FLOOR
        self._filled_at = 0.0
        self.made = 0
        self.refused = 0

    def deposit(self) -> None:
        """A request makes its first attempt."""
        self._balance = min(MOST, self._balance + RATIO)

    def withdraw(self, now: float) -> bool:
        """Whether there may be a retry; if so it is paid for."""
        if self._balance < FLOOR:
            self._balance = min(FLOOR, self._balance + (now - self._filled_at) * FLOOR_PER_S)
        self._filled_at = now
        if self._balance < 1:
            self.refused += 1
            return False
        self._balance -= 1
        self.made += 1
        return True
