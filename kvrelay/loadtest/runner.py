"""Runs a planned load.

Open loop: a request starts when it is due, however many are still under way. Closed loop: a number
of slots, each of which sends its next request when the last one is answered. Either way latency
counts from when the request was due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Protocol

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.workload import PlannedRequest

# A slot of a closed loop waits after a failure, longer after each in a row: a target that is gone
# fails at once.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class Sender(Protocol):
    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends it now; `start` is the test's start on time.perf_counter. Failures are rows too."""
        ...


class _Run:
    def __init__(self, sender: Sender, done: Callable[[Row], None]) -> None:
        self.start = time.perf_counter()
        self._sender, self._done = sender, done
        self._rows: list[Row] = []

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(sorted(self._rows, key=lambda row: row.index))

    async def one(self, index: int, request: PlannedRequest) -> Row:
        row = replace(await self._sender.send(request, self.start), index=index)
        self._rows.append(row)
        self._done(row)
        return row


async def run_load(
    plan: Iterable[PlannedRequest],
    sender: Sender,
    done: Callable[[Row], None],
    stop: asyncio.Event | None = None,
) -> tuple[Row, ...]:
    """Open loop. One row for each request, in the plan's order; `done` sees each when it is
    complete.

    `stop` ends the test at once; requests that were under way then have no row.
    """
    run = _Run(sender, done)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(plan):
                await asyncio.sleep(max(0.0, run.start + request.at - time.perf_counter()))
                group.create_task(run.one(index, request))

    await _until(stop, send_all())
    return run.rows


async def run_closed_loop(
    plan: Iterable[PlannedRequest],
    concurrency: int,
    duration: float | None,
    sender: Sender,
    done: Callable[[Row], None],
    stop: asyncio.Event | None = None,
) -> tuple[Row, ...]:
    """Like `run_load`, but a request is due when one of `concurrency` slots is free; none starts
    after `duration` s.

    A slot whose request failed is free again after a pause.
    """
    run = _Run(sender, done)
    waiting = enumerate(plan)

    async def slot() -> None:
        free, pause = 0.0, 0.0
        for index, request in waiting:
            row = await run.one(index, replace(request, at=free))
            pause = 0.0 if row.ok else min(max(_FIRST_PAUSE_S, 2 * pause), _LONGEST_PAUSE_S)
            if pause:
                await asyncio.sleep(pause)
            free = time.perf_counter() - run.start
            if duration is not None and free >= duration:
                return

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(slot())

    await _until(stop, send_all())
    return run.rows


async def _until(stop: asyncio.Event | None, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or until `stop` is set."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        if stop is not None:
            watching = group.create_task(stop.wait())
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, watching):
                task.cancel()
