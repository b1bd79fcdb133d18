"""Long work on the event loop, in slices, fairly between tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

from kvrelay.errors import KvRelayError
from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

T = TypeVar("T")
SLICE = 2**15  # cost of one turn: well under a millisecond of a processor of 2020


class _Job:
    def __init__(self, steps: Generator[int, None, Any]) -> None:
        self.steps = steps
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class LoopSlices:
    """Runs generators that yield what each step cost. Between two slices, the event loop serves all
    else.

    The work can be stopped after each step, unlike a thread's, and no interpreter lock is held
    against the streams.
    """

    def __init__(self) -> None:
        self._order: FairOrder[_Job] = FairOrder()
        self._scheduled = False

    async def run(self, tenant: Tenant, steps: Generator[int, None, T]) -> T:
        """The generator's result, or what it raises. The first slice runs at once where nobody
        waits.
        """
        job = _Job(steps)
        number = self._order.add(tenant, job)
        if not self._scheduled:
            self._slice()
        try:
            return await job.done  # type: ignore[no-any-return]
        finally:
            self._order.remove(number)
            steps.close()
            # The job has the exception, whose traceback has this frame: a cycle would keep the
            # work's memory.
            del job

    def _slice(self) -> None:
        self._scheduled = False
        found = self._order.first()
        if found is None:
            return
        number, job = found
        cost = 0
        try:
            while cost < SLICE:
                cost += next(job.steps)
        except StopIteration as end:
            self._order.charge(number, cost)
            self._order.remove(number)
            if not job.done.done():  # nobody may wait any more
                job.done.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - the one who waits for the result gets it
            self._order.charge(number, cost)
            self._order.remove(number)
            if not job.done.done():
                # The frames of a refusal hold all that was read so far, and tell nobody anything.
                job.done.set_exception(
                    error.with_traceback(None) if isinstance(error, KvRelayError) else error
                )
        else:
            self._order.charge(number, cost)
        if len(self._order) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._slice)
