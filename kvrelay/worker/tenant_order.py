"""The order in which a worker computes prompts: tenants by served tokens relative to their weight.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvrelay.worker.sequence import Sequence


class TenantTurns:
    """Virtual token counters (Sheng et al., OSDI 2024) of the tenants with prompts on one worker.

    The most urgent priority comes first; within it, the tenant with the fewest served prompt tokens
    relative to its weight; within a tenant, first come, first served. So a long prompt takes its
    tenant's share of the worker's time, and no other tenant waits until it is over. A new tenant
    starts at the counter of the tenant that the last step served first, so idle time earns no
    credit. Counters are kept only for tenants with prompts and tenants ahead of that counter.
    """

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._present: set[str] = set()
        # Counter of the tenant that a step served first, before it was served. Tenants that a step
        # serves later may be far ahead of waiting tenants: they take what is left of the chunk.
        self._virtual = 0.0
        self._is_first = True

    def order(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yields each sequence once, in fair order. The sequences of one tenant keep their order in
        `sequences`.

        Charges between two sequences affect the next choice.
        """
        lines: dict[tuple[int, str], deque[tuple[int, Sequence]]] = {}
        for place, sequence in enumerate(sequences):
            lines.setdefault((sequence.spec.priority, sequence.spec.tenant), deque()).append(
                (place, sequence)
            )
        self._come({tenant for _, tenant in lines})
        self._is_first = True
        while lines:
            priority, tenant = min(
                lines, key=lambda key: (key[0], self._counters[key[1]], lines[key][0][0])
            )
            line = lines[priority, tenant]
            _, sequence = line.popleft()
            if not line:
                del lines[priority, tenant]
            yield sequence

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Records that the next step computes `tokens` tokens of the sequence's prompt."""
        tenant = sequence.spec.tenant
        if self._is_first:
            self._virtual = max(self._virtual, self._counters[tenant])
            self._is_first = False
        self._counters[tenant] += tokens / sequence.weight

    def _come(self, tenants: set[str]) -> None:
        for tenant in tenants - self._present:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._virtual)
        if tenants != self._present:
            self._counters = {
                tenant: counter
                for tenant, counter in self._counters.items()
                if tenant in tenants or counter > self._virtual
            }
        self._present = tenants
