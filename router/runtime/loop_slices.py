"""Long work on the event loop, in slices that tenants share fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

from kvrelay.errors import KvRelayError
from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

T = TypeVar("T")
# Cost of one slice. It takes less than a quarter of a millisecond on a processor of 2020.
SLICE = 2**12


class _Job:
    def __init__(self, steps: Generator[int, None, Any]) -> None:
        self.steps = steps
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class LoopSlices:
    """Runs generators that yield the cost of each step, with one slice of work in each round of the
    event loop. Between two slices the event loop does its other work.

    Unlike work in a thread, this work can be stopped after each step and does not hold the
    interpreter lock against the streams.
    """

    def __init__(self) -> None:
        self._order: FairOrder[_Job] = FairOrder()
        # What is left of this round's slice.
        self._left = SLICE
        # Whether the next round is scheduled, as it is after any work.
        self._scheduled = False

    async def run(self, tenant: Tenant, steps: Generator[int, None, T]) -> T:
        """Returns the generator's result or raises its error. The first steps run at once if no job
        waits.
        """
        job = _Job(steps)
        number = self._order.add(tenant, job)
        if len(self._order) == 1:
            self._slice()
        try:
            return await job.done  # type: ignore[no-any-return]
        finally:
            self._order.remove(number)
            steps.close()
            # The job refers to the exception, whose traceback refers to this frame. The reference
            # cycle would keep the work's memory.
            del job

    def _slice(self) -> None:
        while self._left > 0 and (found := self._order.first()) is not None:
            self._left -= self._advance(*found, self._left)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._scheduled = False
        self._left = SLICE
        if len(self._order):
            self._slice()

    def _advance(self, number: int, job: _Job, most: int) -> int:
        """Runs a job to its end, or until it has cost `most`. Returns its cost."""
        cost = 0
        try:
            while cost < most:
                cost += next(job.steps)
        except StopIteration as end:
            self._order.charge(number, cost)
            self._order.remove(number)
            # The caller may be cancelled.
            if not job.done.done():
                job.done.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - the caller gets the error
            self._order.charge(number, cost)
            self._order.remove(number)
            if not job.done.done():
                # The frames of a KvRelayError hold all data read so far and have no diagnostic
                # value.
                job.done.set_exception(
                    error.with_traceback(None) if isinstance(error, KvRelayError) else error
                )
        else:
            self._order.charge(number, cost)
        return cost
