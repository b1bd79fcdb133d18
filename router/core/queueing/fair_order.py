"""Whose work is next, among tenants that wait for the same thing. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvrelay.tenants import Tenant

T = TypeVar("T")
_KEPT = 16  # tenants that wait for nothing, before some are forgotten


class _Line(Generic[T]):
    def __init__(self) -> None:
        self.counter = 0.0  # cost so far, over the tenant's weight
        self.weight = 1.0
        # By kind and number, in order of arrival; no kind is empty
        self.jobs: dict[int, OrderedDict[int, T]] = {}


class FairOrder(Generic[T]):
    """The tenant with the least cost so far, for its weight, goes first; within a tenant, the job
    that came first.

    As router.core.queueing.fair_queue.FairQueue counts tokens, this counts what a job costs: bytes,
    or steps. A tenant that comes back begins at the counter of the tenant that was charged last, so
    idle time earns no credit.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._where: dict[int, tuple[str, int]] = {}  # tenant and kind, by number
        self._number = 0
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def add(self, tenant: Tenant, job: T, kind: int = 0) -> int:
        """The number under which the job is known here. Numbers grow."""
        line = self._lines.setdefault(tenant.name, _Line())
        line.weight = tenant.weight
        if not line.jobs:
            line.counter = max(line.counter, self._virtual_time)
        self._number += 1
        line.jobs.setdefault(kind, OrderedDict())[self._number] = job
        self._where[self._number] = tenant.name, kind
        return self._number

    def first(self, kinds: Sequence[int] = (0,)) -> tuple[int, T] | None:
        """Number and job of the one of these kinds whose turn it is; it stays. None if there is
        none.
        """
        turns = (
            (line.counter, *next(iter(line.jobs[kind].items())))
            for line in self._lines.values()
            for kind in kinds
            if kind in line.jobs
        )
        best = min(turns, key=lambda turn: turn[:2], default=None)
        return None if best is None else best[1:]

    def charge(self, number: int, cost: float) -> None:
        """Of a job that is here: what it costs its tenant."""
        line = self._lines[self._where[number][0]]
        self._virtual_time = max(self._virtual_time, line.counter)
        line.counter += cost / line.weight

    def remove(self, number: int) -> None:
        """Nothing happens where it is not here."""
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
        """Of those that wait for nothing: the ones that would begin at the virtual time anyway."""
        idle = [
            name
            for name, line in self._lines.items()
            if not line.jobs and line.counter <= self._virtual_time
        ]
        for name in idle:
            del self._lines[name]
