"""Sends a planned load.

In an open loop, a request starts when it is due, however many requests are in progress. In a closed
loop, each of a fixed number of slots sends its next request when the previous request is answered.
In both, latency counts from the time when the request was due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Protocol

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.workload import PlannedRequest

# A slot of a closed loop pauses after a failure, longer after each consecutive failure, because a
# target that is down fails at once.
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


class Sender(Protocol):
    """Sends single requests to a target."""

    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends the request now and returns its row; failures are rows too. `start` is the start of
        the test on time.perf_counter.
        """
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
    """Runs an open loop. Returns one row per request, in the order of the plan. Calls `done` with
    each complete row.

    `stop` ends the test at once. Requests in progress at that time have no row.
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
    """Runs a closed loop, like `run_load`. A request is due when one of `concurrency` slots is
    free. No request starts after `duration` seconds.

    A slot whose request failed pauses before it is free again.
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
