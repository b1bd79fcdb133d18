"""Threads that tenants share fairly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from kvrelay.process.uninterrupted import to_its_end
from kvrelay.tenants import Tenant
from router.core.queueing.short_job_lanes import Lanes

T = TypeVar("T")


class FairLanes:
    """Turns on a bounded number of lanes. The holder of a turn uses a thread or process of its
    own.
    """

    def __init__(self, lanes: int, short: float) -> None:
        self._lanes: Lanes[asyncio.Future[None]] = Lanes(lanes, short)

    @asynccontextmanager
    async def turn(self, tenant: Tenant, cost: float) -> AsyncIterator[None]:
        """Holds a lane during the body. `router.core.queueing.short_job_lanes` defines the order of
        those that wait. A cancelled waiter leaves the queue.
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = self._lanes.add(tenant, begun, cost)
        self._start()
        try:
            await begun
            yield
        finally:
            self._lanes.end(number)
            self._start()

    def _start(self) -> None:
        while (started := self._lanes.start()) is not None:
            number, begun = started
            if begun.cancelled():
                self._lanes.end(number)
            else:
                begun.set_result(None)


class FairThreads:
    """A thread pool for one kind of work."""

    def __init__(self, threads: int, short: float, name: str) -> None:
        self._turns = FairLanes(threads, short)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, tenant: Tenant, cost: float, work: Callable[[], T]) -> T:
        """Runs `work` on a thread and returns its result or raises its error. The lane stays in use
        until the thread is free, even if the caller is cancelled.
        """
        async with self._turns.turn(tenant, cost):
            return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def close(self) -> None:
        """Ends the pool without waiting for its threads, which cannot be stopped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
