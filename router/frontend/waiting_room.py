"""Delays for callers that poll, get errors or have no valid token, on HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from kvrelay.clock import Clock
from router.core.queueing.request_pace import STRANGER, Pace

# Limits on the waiting polls of a tenant, and on waiting callers without a valid token, over both
# protocols. Each occupies about 30 KiB. A poll beyond the limit is answered at once, so a flood is
# only slowed down while its calls fit: 8192 are those of 64 gRPC connections.
MAX_POLLS, MAX_STRANGERS = 8192, 1024


class InProgress:
    """Counts each tenant's requests in progress on one protocol, so that no tenant takes all of a
    listener's connections or calls.
    """

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def begin(self, name: str, most: int) -> bool:
        """Counts a request of the tenant, or returns False if `most` are in progress."""
        if self._running[name] >= most:
            return False
        self._running[name] += 1
        return True

    def end(self, name: str) -> None:
        """Counts the end of a request that has begun."""
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]


class WaitingRoom:
    """Applies `Pace` to all callers of one router. A caller waits here before the router serves or
    rejects its request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pace = Pace()
        # Number of waiting callers without a valid token.
        self._strangers = 0
        # By tenant: waiting requests other than polls, and waiting polls.
        self._waiting: Counter[str] = Counter()
        self._polls: Counter[str] = Counter()

    async def tenant(self, name: str, poll: bool) -> None:
        """Waits until the tenant's debt is paid off. A poll is charged at once; `refused` charges
        other requests.

        Waiting requests leave one after the other, at the tenant's pace. A poll does not wait if
        MAX_POLLS polls of the tenant wait already.
        """
        wait_s = self._wait_s(name, charge=poll)
        waiting = self._polls if poll else self._waiting
        if not wait_s or (poll and waiting[name] >= MAX_POLLS):
            return
        waiting[name] += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            waiting[name] -= 1
            if not waiting[name]:
                del waiting[name]

    async def stranger(self) -> bool:
        """Waits until the common debt of callers without a valid token is paid off, and charges one
        error.

        Returns False at once if MAX_STRANGERS callers wait already.
        """
        wait_s = self._wait_s(STRANGER, charge=True)
        if not wait_s:
            return True
        if self._strangers >= MAX_STRANGERS:
            return False
        self._strangers += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._strangers -= 1
        return True

    def refused(self, name: str, choices: int = 1) -> None:
        """Charges the tenant for a request, other than a poll, that ends with an error. `choices`:
        the number of answers that it asked for.
        """
        self._pace.charge(name, self._clock.now(), choices)

    def keep(self, names: Iterable[str]) -> None:
        """Forgets the debts of all other tenants, but keeps the debt of callers without a valid
        token.
        """
        self._pace.keep({*names, STRANGER})

    def _wait_s(self, name: str, charge: bool) -> float:
        now = self._clock.now()
        wait_s = self._pace.wait_s(name, now, self._waiting[name])
        if charge:
            self._pace.charge(name, now)
        return wait_s
