"""Limits on the number of gRPC messages in reception. Slow senders delay only themselves."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.errors import DeadlineExceeded, ResourceExhausted
from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

# Each message has at most 4 MiB.
SLOTS = 32
# After this time, a message can be evicted for a tenant with fewer slots.
SLOW_S = 1.0
# Slots for calls without a token, and the time of each.
PROBES = 64
PROBE_S = 5.0


class _Slot:
    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Time at which the body began; math.inf before. Until then, the slot cannot be evicted.
        self.since = math.inf
        self.bound = asyncio.timeout(None)
        self.evicted = False


class ReceiveSlots:
    """Slots for calls that read a message. gRPC reports a message's size only after the whole
    message has arrived, so the number of calls is bounded instead.

    Calls wait for a slot in the fair order of their tenants. A tenant holds at most as many slots
    as are free (the dynamic thresholds of Choudhury and Hahne, "Dynamic queue length thresholds for
    shared-memory packet switches", 1998), so other tenants find a free slot at once. While many
    tenants hold all slots, the tenant with the most slots per weight loses a slot whose message has
    been arriving for SLOW_S.
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
                slot.since = asyncio.get_running_loop().time()
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
        while (found := self._next()) is not None:
            number, slot = found
            self._order.charge(number, 1.0)
            self._order.remove(number)
            if not slot.begun.cancelled():
                self._taken[slot] = None
                slot.begun.set_result(None)

    def _next(self) -> tuple[int, _Slot] | None:
        """Returns the number and slot of the call to start now."""
        free = self._slots - len(self._taken)
        held = Counter(slot.tenant.name for slot in self._taken)
        if free:
            return self._order.first(without={name for name in held if held[name] >= free})
        found = self._order.first()
        loop = asyncio.get_running_loop()
        if found is None or self._evict(found[1].tenant, loop.time()):
            return found
        self._retry = loop.call_later(SLOW_S, self._start)
        return None

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


class ProbeSlots:
    """Slots for calls without a token. A genuine probe sends its message together with its headers,
    so a new call takes the slot of the oldest, and none waits.
    """

    def __init__(self, slots: int = PROBES) -> None:
        self._slots = slots
        # Oldest first.
        self._taken: dict[asyncio.Timeout, None] = {}

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot during the body. Raises DeadlineExceeded in the body if it takes longer than
        PROBE_S or if a new call takes the slot.
        """
        if len(self._taken) >= self._slots:
            oldest = next(iter(self._taken))
            del self._taken[oldest]
            # Its time may have run out just now.
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        bound = asyncio.timeout(PROBE_S)
        self._taken[bound] = None
        try:
            async with bound:
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                "the message did not arrive with the call; send it at once"
            ) from None
        finally:
            self._taken.pop(bound, None)
