"""How many messages may be on their way into memory at one time, fairly between tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

SLOTS = 64  # messages of 4 MiB each
SLOW_S = 1.0  # after which a message gives way to one of a tenant that has fewer


class _Slot:
    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since = 0.0
        self.bound = asyncio.timeout(None)
        self.evicted = False


class ReceiveSlots:
    """gRPC tells the size of a message when all of it is there, so calls are bounded that read one.

    Calls wait for a slot in the fair order of their tenants. While all are taken, the tenant with
    most slots for its weight gives up one whose message has been on its way for SLOW_S: slow
    senders hold up themselves only.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._order: FairOrder[_Slot] = FairOrder()
        self._taken: dict[_Slot, None] = {}  # in order of their beginning
        self._retry: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, tenant: Tenant) -> AsyncIterator[None]:
        """Raises ResourceExhausted for the one that gives way, whatever it was at."""
        slot = _Slot(tenant)
        number = self._order.add(tenant, slot)
        self._start()
        try:
            await slot.begun
            async with slot.bound:
                yield
        except TimeoutError:
            if not slot.evicted:
                raise
            raise ResourceExhausted(
                "too many messages are on their way at one time; this tenant has the most of them, "
                "so send fewer at a time, and faster",
                retry_after_s=1.0,
            ) from None
        finally:
            self._order.remove(number)
            self._taken.pop(slot, None)
            self._start()

    def _start(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while (found := self._order.first()) is not None:
            number, slot = found
            now = asyncio.get_running_loop().time()
            if len(self._taken) >= self._slots and not self._evict(slot.tenant, now):
                self._retry = asyncio.get_running_loop().call_later(SLOW_S, self._start)
                return
            self._order.charge(number, 1.0)
            self._order.remove(number)
            if not slot.begun.cancelled():
                slot.since = now
                self._taken[slot] = None
                slot.begun.set_result(None)

    def _evict(self, tenant: Tenant, now: float) -> bool:
        """Whether there is a slot now for one of that tenant's."""
        shares: dict[str, float] = {}
        for slot in self._taken:
            shares[slot.tenant.name] = shares.get(slot.tenant.name, 0.0) + 1 / slot.tenant.weight
        largest = max(shares, key=lambda name: shares[name])
        if shares[largest] <= shares.get(tenant.name, 0.0) + 1 / tenant.weight:
            return False
        slow = [
            one for one in self._taken if one.tenant.name == largest and now - one.since >= SLOW_S
        ]
        if not slow:
            return False
        del self._taken[slow[-1]]
        slow[-1].evicted = True
        slow[-1].bound.reschedule(now)
        return True
