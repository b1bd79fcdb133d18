"""Fair order of jobs among tenants that wait for the same resource. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Generic, TypeVar

from kvrelay.tenants import Tenant

T = TypeVar("T")
# Number of idle tenants to keep before some are forgotten.
_KEPT = 16


class _Line(Generic[T]):
    def __init__(self) -> None:
        # Cost so far, divided by the tenant's weight.
        self.counter = 0.0
        self.weight = 1.0
        # By kind and number, in order of arrival. No kind is empty.
        self.jobs: dict[int, OrderedDict[int, T]] = {}


class FairOrder(Generic[T]):
    """Orders jobs: the tenant with the least cost so far per weight goes first. Within a tenant,
    jobs run in order of arrival.

    router.core.queueing.fair_queue.FairQueue counts tokens; this class counts the cost of a job:
    bytes or steps. A returning tenant starts at the counter of the tenant that was charged last, so
    idle time earns no credit.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        # Tenant and kind, by number.
        self._where: dict[int, tuple[str, int]] = {}
        self._number = 0
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def add(self, tenant: Tenant, job: T, kind: int = 0) -> int:
        """Adds a job and returns its number. Numbers grow."""
        line = self._lines.setdefault(tenant.name, _Line())
        line.weight = tenant.weight
        if not line.jobs:
            line.counter = max(line.counter, self._virtual_time)
        self._number += 1
        line.jobs.setdefault(kind, OrderedDict())[self._number] = job
        self._where[self._number] = tenant.name, kind
        return self._number

    def first(
        self, kinds: Sequence[int] = (0,), without: Container[str] = ()
    ) -> tuple[int, T] | None:
        """Returns the number and job of the next job of these kinds, without removing it. None if
        there is none. `without` names tenants to skip.
        """
        turns = (
            (line.counter, *next(iter(line.jobs[kind].items())))
            for name, line in self._lines.items()
            for kind in kinds
            if kind in line.jobs and name not in without
        )
        best = min(turns, key=lambda turn: turn[:2], default=None)
        return None if best is None else best[1:]

    def charge(self, number: int, cost: float) -> None:
        """Charges the cost of a waiting job to its tenant."""
        line = self._lines[self._where[number][0]]
        self._virtual_time = max(self._virtual_time, line.counter)
        line.counter += cost / line.weight

    def remove(self, number: int) -> None:
        """Removes the job. Does nothing if the number is unknown."""
        if number not in self._where:
            return
        name, kind = self._where.pop(number)
        jobs = self._lines[name].jobs
        del jobs[kind][number]
        if not jobs[kind]:
            del jobs[kind]
        if len(self._lines) > 2 * len(self._where) + _KEPT:
            self._forget()

    def _forget(self) -> None:
        """Forgets idle tenants that would start at the virtual time anyway."""
        idle = [
            name
            for name, line in self._lines.items()
            if not line.jobs and line.counter <= self._virtual_time
        ]
        for name in idle:
            del self._lines[name]
