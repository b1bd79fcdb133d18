"""Runs a planned load, open loop: a request starts when it is due, however many are still under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.loadtest.row import Row
from kvrelay.loadtest.workload import PlannedRequest


class Sender(Protocol):
    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends it now; `start` is the test's start on time.perf_counter. Failures are rows too."""
        ...


async def run_load(plan: Sequence[PlannedRequest], sender: Sender, done: Callable[[Row], None]) -> tuple[Row, ...]:
    """One row for each request, in the plan's order; `done` sees each when it is complete."""
    start = time.perf_counter()

    async def one(request: PlannedRequest) -> Row:
        row = await sender.send(request, start)
        done(row)
        return row

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in plan:
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
            tasks.append(group.create_task(one(request)))
    return tuple(task.result() for task in tasks)
