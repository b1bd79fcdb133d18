"""Which of the waiting jobs may run on a few threads or processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.tenants import Tenant
from router.core.queueing.fair_order import FairOrder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    what: T
    cost: float
    long: bool


class Lanes(Generic[T]):
    """A bounded number of lanes, of which one takes short jobs only.

    Long jobs, of all tenants together, never occupy that lane. So a short job waits for short ones
    alone, in the fair order of tenants. A single lane is for all.
    """

    def __init__(self, lanes: int, short: float) -> None:
        """`short` is the largest cost of a short job."""
        self._free = lanes
        self._free_for_long = max(1, lanes - 1)
        self._short = short
        self._order: FairOrder[_Job[T]] = FairOrder()
        self._running: dict[int, _Job[T]] = {}

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._order)

    def add(self, tenant: Tenant, what: T, cost: float) -> int:
        """The number of the job, which waits now."""
        long = cost > self._short
        return self._order.add(tenant, _Job(what, cost, long), kind=int(long))

    def start(self) -> tuple[int, T] | None:
        """Number and job of one that is to run now. None if there is none, or no lane for it."""
        if not self._free:
            return None
        found = self._order.first((0, 1) if self._free_for_long else (0,))
        if found is None:
            return None
        number, job = found
        self._order.charge(number, job.cost)
        self._order.remove(number)
        self._running[number] = job
        self._free -= 1
        self._free_for_long -= job.long
        return number, job.what

    def end(self, number: int) -> None:
        """Of a job that ran, or of one that still waits and is not wanted any more."""
        self._order.remove(number)
        job = self._running.pop(number, None)
        if job is not None:
            self._free += 1
            self._free_for_long += job.long
