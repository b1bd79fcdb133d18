"""Pairs of workers between which hand-offs fail."""

from __future__ import annotations

from kvrelay.errors import Code
from router.core.path_policy import Assignment
from router.core.workers.circuit_breaker import Breaker

OPEN_S = (5.0, 60.0)


def handoff_failed(placed: Assignment, worker_id: str, code: Code) -> bool:
    """Whether an attempt that a worker failed came to nothing between its two workers, not on one
    of them.
    """
    if not placed.prefill or code in (Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED):
        return False
    if worker_id == placed.prefill:
        return code is not Code.INTERNAL
    # KV that came is not the prompt's, or none came
    return code in (Code.DATA_LOSS, Code.FAILED_PRECONDITION)


class Links:
    """A circuit breaker for each pair (prefill worker, decode worker), opened by one failed
    hand-off.

    Both may be well and the network between them not, so neither is blamed: each goes on with
    others.
    """

    def __init__(self) -> None:
        # Of pairs that failed and have not worked since
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def broken(self, now: float) -> frozenset[tuple[str, str]]:
        """Pairs that are not to be used now."""
        return frozenset(
            pair for pair, breaker in self._breakers.items() if not breaker.passes(now)
        )

    def used(self, prefill: str, decode: str, now: float) -> None:
        breaker = self._breakers.get((prefill, decode))
        if breaker is not None:
            breaker.passed(now)

    def failed(
        self, prefill: str, decode: str, begun: float, reason: str, now: float
    ) -> float | None:
        """A hand-off that began at `begun`. Returns for how long it is not tried again, if that is
        news.
        """
        breaker = self._breakers.setdefault((prefill, decode), Breaker(*OPEN_S))
        return breaker.open(reason, now) if begun > breaker.changed_at else None

    def worked(self, prefill: str, decode: str) -> None:
        self._breakers.pop((prefill, decode), None)

    def forget(self, worker_id: str) -> None:
        """The worker is gone; who comes in its place is reached another way."""
        self._breakers = {
            pair: one for pair, one in self._breakers.items() if worker_id not in pair
        }
