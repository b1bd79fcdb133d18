"""Scheduling of waiting jobs on a few threads or processes. Pure."""

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
    """A bounded number of lanes, of which one is reserved for short jobs.

    Long jobs of all tenants together never occupy the reserved lane. So a short job waits only for
    other short jobs, in the fair order of tenants. A single lane takes all jobs.
    """

    def __init__(self, lanes: int, short: float) -> None:
        """`short` is the largest cost of a short job."""
        self._free = lanes
        self._free_for_long = max(1, lanes - 1)
        self._short = short
        self._order: FairOrder[_Job[T]] = FairOrder()
        self._running: dict[int, _Job[T]] = {}

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return len(self._order)

    def add(self, tenant: Tenant, what: T, cost: float) -> int:
        """Adds a waiting job and returns its number."""
        long = cost > self._short
        return self._order.add(tenant, _Job(what, cost, long), kind=int(long))

    def start(self) -> tuple[int, T] | None:
        """Starts the next job and returns its number and the job. None if no job waits or no lane
        is free for it.
        """
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
        """Ends a running job, or drops a waiting job."""
        self._order.remove(number)
        job = self._running.pop(number, None)
        if job is not None:
            self._free += 1
            self._free_for_long += job.long
