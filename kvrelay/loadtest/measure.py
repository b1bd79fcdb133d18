"""Runs one test: sends a plan to a target and collects all measurements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.loadtest.counters import PrefixCache
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import Watch
from kvrelay.loadtest.reuse import measure_reuse
from kvrelay.loadtest.runner import Sender, run_closed_loop, run_load
from kvrelay.loadtest.senders.target import Target
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Run:
    """The plan and the settings of one test."""

    plan: Iterable[PlannedRequest]
    # Recorded in the report.
    options: dict[str, Any]
    slos: tuple[Slo, ...]
    # Slots of a closed loop; None: open loop.
    concurrency: int | None = None
    # Seconds of a closed loop.
    duration: float | None = None


async def measure(
    target: Target, run: Run, done: Callable[[Row], None], stop: asyncio.Event
) -> Report:
    """Runs a test and returns its report. Calls `done` with each row as it is complete. `stop` ends
    the test early. Failed requests are rows of the report; they are not raised.
    """
    prompts: dict[int, Sequence[int]] = {}
    requests = _noting(run.plan, prompts)
    sender = _Counting(target.sender)
    before = await _counters(target)
    async with _watching(target) as watch:
        if run.concurrency is None:
            rows = await run_load(requests, sender, done, stop)
        else:
            rows = await run_closed_loop(
                requests, run.concurrency, run.duration, sender, done, stop
            )
    after = await _counters(target)
    grown = None if before is None or after is None else after.since(before)
    return Report(
        run.options,
        run.slos,
        rows,
        timeline=None if watch is None else watch.timeline(),
        reuse=measure_reuse(prompts, rows, target.block_tokens, grown) if prompts else None,
        interrupted=stop.is_set(),
        in_flight=sender.sent - len(rows),
        unsent=len(run.plan) - sender.sent if isinstance(run.plan, Sequence) else None,
    )


class _Counting:
    """Counts the requests that are sent."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.sent = 0

    async def send(self, request: PlannedRequest, start: float) -> Row:
        """Sends the request and returns its row."""
        self.sent += 1
        return await self._sender.send(request, start)


async def _counters(target: Target) -> PrefixCache | None:
    """Returns None if the target does not answer, because a missing counter must not abort the
    test.
    """
    try:
        return await target.counters()
    except KvRelayError:
        return None


def _noting(
    plan: Iterable[PlannedRequest], prompts: dict[int, Sequence[int]]
) -> Iterator[PlannedRequest]:
    """Keeps the token ids of the requests that are sent."""
    for index, request in enumerate(plan):
        if request.token_ids is not None:
            prompts[index] = request.token_ids
        yield request


@asynccontextmanager
async def _watching(target: Target) -> AsyncIterator[Watch | None]:
    if target.admin is None:
        yield None
        return
    watch = Watch(target.admin)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
