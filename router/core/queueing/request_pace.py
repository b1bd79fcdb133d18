"""How fast each tenant's polls and refused requests are answered. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PER_SECOND = 100.0  # of one tenant, answered without a wait
STRANGER = ""  # who has shown no token that is known; all of them together
BURST = 200.0  # of one tenant, before any of its requests waits
MAX_WAIT_S = 10.0


@dataclass(slots=True)
class _Debt:
    requests: float = 0.0
    at: float = 0.0


class Pace:
    """Spreads what costs the event loop and brings no token: polls, and requests that end with an
    error.

    Each of these adds one to its tenant's debt, which falls by PER_SECOND. Above BURST every
    further request of that tenant waits until the debt has been paid off, however many connections
    it comes by. Answers that succeed cost nothing here; the queue, the limits and the connections
    bound those.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def wait_s(self, tenant: str, now: float, ahead: int = 0) -> float:
        """Seconds that a request of the tenant has to wait now, at most MAX_WAIT_S.

        `ahead` is the number of its requests that wait already and may cost it one each.
        """
        debt = self._debts.get(tenant)
        if debt is None:
            return 0.0
        return min(MAX_WAIT_S, max(0.0, (self._left(debt, now) + ahead - BURST) / PER_SECOND))

    def charge(self, tenant: str, now: float) -> None:
        """Counts a poll or a refusal. Debts beyond MAX_WAIT_S are not added up: a tenant that stops
        is forgiven.
        """
        debt = self._debts.setdefault(tenant, _Debt())
        debt.requests = min(self._left(debt, now) + 1.0, BURST + PER_SECOND * MAX_WAIT_S)
        debt.at = now

    def keep(self, tenants: Iterable[str]) -> None:
        """Forgets all other tenants."""
        for gone in self._debts.keys() - set(tenants):
            del self._debts[gone]

    def _left(self, debt: _Debt, now: float) -> float:
        return max(0.0, debt.requests - (now - debt.at) * PER_SECOND)
