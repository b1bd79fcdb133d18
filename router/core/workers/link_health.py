"""Link health: pairs of workers whose hand-offs fail."""

from __future__ import annotations

from kvrelay.errors import Code
from router.core.path_policy import Assignment
from router.core.workers.circuit_breaker import Breaker

OPEN_S = (5.0, 60.0)


def handoff_failed(placed: Assignment, worker_id: str, code: Code) -> bool:
    """Whether a failed attempt failed between its two workers, rather than on one of them."""
    if not placed.prefill or code in (Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED):
        return False
    if worker_id == placed.prefill:
        return code is not Code.INTERNAL
    # The received KV is not the prompt's, or no KV arrived.
    return code in (Code.DATA_LOSS, Code.FAILED_PRECONDITION)


class LinkHealth:
    """A circuit breaker for each pair (prefill worker, decode worker). One failed hand-off opens
    it.

    Both workers may be healthy while the network between them is not. So neither worker is blamed,
    and each continues with other workers.
    """

    def __init__(self) -> None:
        # Pairs that failed and have not succeeded since.
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def broken(self, now: float) -> frozenset[tuple[str, str]]:
        """Returns the pairs that must not be used now."""
        return frozenset(
            pair for pair, breaker in self._breakers.items() if not breaker.passes(now)
        )

    def used(self, prefill: str, decode: str, now: float) -> None:
        """Records that a request was placed on the pair."""
        breaker = self._breakers.get((prefill, decode))
        if breaker is not None:
            breaker.passed(now)

    def failed(
        self, prefill: str, decode: str, begun: float, reason: str, now: float
    ) -> float | None:
        """Records a failed hand-off of an attempt that began at `begun`. Returns the seconds until
        the next try, or None if the breaker has changed since `begun`.
        """
        breaker = self._breakers.setdefault((prefill, decode), Breaker(*OPEN_S))
        return breaker.open(reason, now) if begun > breaker.changed_at else None

    def worked(self, prefill: str, decode: str) -> None:
        """Records a successful hand-off, which closes the pair's breaker."""
        self._breakers.pop((prefill, decode), None)

    def forget(self, worker_id: str) -> None:
        """Forgets the pairs of a lost worker. Its replacement has other links."""
        self._breakers = {
            pair: one for pair, one in self._breakers.items() if worker_id not in pair
        }
