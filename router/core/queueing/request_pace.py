"""Pacing of each tenant's polls and failed requests. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Rate per tenant without delay.
PER_SECOND = 100.0
# Name that all callers without a valid token share.
STRANGER = ""
# Requests of one tenant before its requests are delayed.
BURST = 200.0
MAX_WAIT_S = 10.0


@dataclass(slots=True)
class _Debt:
    requests: float = 0.0
    at: float = 0.0


class Pace:
    """Paces the requests that load the event loop without producing tokens: polls, and requests
    that end with an error.

    Each such request adds one to its tenant's debt, which falls by PER_SECOND. Above BURST, each
    further request of the tenant waits until the debt is paid off, over all its connections.
    Successful requests add no debt; the queue, the rate limits and the connection limits bound
    them.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def wait_s(self, tenant: str, now: float, ahead: int = 0) -> float:
        """Returns the seconds that a request of the tenant has to wait now, at most MAX_WAIT_S.

        `ahead` is the number of the tenant's waiting requests, each of which may add one to the
        debt.
        """
        debt = self._debts.get(tenant)
        if debt is None:
            return 0.0
        return min(MAX_WAIT_S, max(0.0, (self._left(debt, now) + ahead - BURST) / PER_SECOND))

    def charge(self, tenant: str, now: float, requests: int = 1) -> None:
        """Counts a poll or an error; `requests`: of how many requests. The debt is capped at a wait
        of MAX_WAIT_S, so a tenant that pauses recovers.
        """
        debt = self._debts.setdefault(tenant, _Debt())
        debt.requests = min(self._left(debt, now) + requests, BURST + PER_SECOND * MAX_WAIT_S)
        debt.at = now

    def keep(self, tenants: Iterable[str]) -> None:
        """Forgets all other tenants."""
        for gone in self._debts.keys() - set(tenants):
            del self._debts[gone]

    def _left(self, debt: _Debt, now: float) -> float:
        return max(0.0, debt.requests - (now - debt.at) * PER_SECOND)
