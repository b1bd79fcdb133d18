"""Delays for callers that poll, are refused or have no valid token, on HTTP and gRPC alike."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from kvrelay.clock import Clock
from router.core.queueing.request_pace import STRANGER, Pace

MAX_STRANGERS = 1024  # that wait at a time, over both protocols together


class WaitingRoom:
    """Applies `Pace` to all callers of one router: each waits here before the router serves or
    refuses it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pace = Pace()
        self._strangers = 0  # waiting
        self._waiting: Counter[str] = Counter()  # requests that are no polls, by tenant

    async def tenant(self, name: str, poll: bool) -> None:
        """Waits until the tenant's debt is paid off. A poll is charged at once; for other requests
        see `refused`.

        Requests that wait leave one after the other, at the tenant's pace.
        """
        wait_s = self._wait_s(name, charge=poll)
        if not wait_s:
            return
        if not poll:
            self._waiting[name] += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            if not poll:
                self._waiting[name] -= 1
                if not self._waiting[name]:
                    del self._waiting[name]

    async def stranger(self) -> bool:
        """Waits until the strangers' common debt is paid off, and charges them for a refusal.

        Returns False, without a wait, if MAX_STRANGERS wait already.
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

    def refused(self, name: str) -> None:
        """Charges the tenant for a request, other than a poll, that ends with an error."""
        self._pace.charge(name, self._clock.now())

    def keep(self, names: Iterable[str]) -> None:
        """Forgets the debts of all other tenants, but not that of strangers."""
        self._pace.keep({*names, STRANGER})

    def _wait_s(self, name: str, charge: bool) -> float:
        now = self._clock.now()
        wait_s = self._pace.wait_s(name, now, self._waiting[name])
        if charge:
            self._pace.charge(name, now)
        return wait_s
