"""Retry budget of a router."""

from __future__ import annotations

# Retries that each request earns.
RATIO = 0.2
# Largest balance, in retries.
MOST = 100.0
# Balance at the start, in retries.
FLOOR = 10.0
# Growth of the balance while it is below FLOOR.
FLOOR_PER_S = 1.0


class RetryBudget:
    """A token bucket that requests fill and retries empty, as in Finagle's RetryBudget and Envoy's
    retry budgets.

    In a sick cluster, retries that each request decides by itself multiply the load: five attempts
    each are five times the load. With a common budget there are at most 1 + RATIO attempts per
    request in the long run, plus FLOOR. FLOOR lets a quiet cluster fail over, where a lost attempt
    would otherwise find an empty bucket.

    Three cases use no budget, since none of them can cause a retry storm:
    - A worker refused the request. The worker did no work, and the request waits in the queue.
    - A worker drains. An operator asked for the drain, and each request moves once.
    - A worker is lost. Each of its requests moves once, so the number of moves is bounded by the
      worker's batch size at any load. `router.core.poison_detection` stops a request that kills
      workers, and `router.max_attempts` bounds every request. If these moves used the budget, the
      crash of one busy worker in a small cluster would empty it and fail healthy requests.
    """

    def __init__(self) -> None:
        self._balance = FLOOR
        self._filled_at = 0.0
        self.made = 0
        self.refused = 0

    def deposit(self) -> None:
        """Adds RATIO retries to the balance. Call it at the first attempt of a request."""
        self._balance = min(MOST, self._balance + RATIO)

    def withdraw(self, now: float) -> bool:
        """Takes one retry from the balance at `now` (seconds). Returns whether the retry is
        allowed.
        """
        if self._balance < FLOOR:
            self._balance = min(FLOOR, self._balance + (now - self._filled_at) * FLOOR_PER_S)
        self._filled_at = now
        if self._balance < 1:
            self.refused += 1
            return False
        self._balance -= 1
        self.made += 1
        return True
