"""Limit on the number of gRPC messages in reception, shared fairly between tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

# Each message has at most 4 MiB.
SLOTS = 64
# After this time, a message can be evicted for a tenant with fewer slots.
SLOW_S = 1.0


class _Slot:
    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since = 0.0
        self.bound = asyncio.timeout(None)
        self.evicted = False


class ReceiveSlots:
    """Slots for calls that read a message. gRPC reports a message's size only after the whole
    message has arrived, so the number of calls is bounded instead.

    Calls wait for a slot in the fair order of their tenants. While all slots are taken, the tenant
    with the most slots per weight loses a slot whose message has been arriving for SLOW_S. So slow
    senders delay only themselves.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._order: FairOrder[_Slot] = FairOrder()
        # Oldest first.
        self._taken: dict[_Slot, None] = {}
        self._retry: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds a slot during the body. Raises ResourceExhausted if the slot is evicted, at any
        point of the body.
        """
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
                "too many messages are being received; this tenant has the most, so send "
                "fewer at a time, or send them faster",
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
        """Evicts a slow slot of the tenant with the largest share. Returns whether a slot is free
        for `tenant`.
        """
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
