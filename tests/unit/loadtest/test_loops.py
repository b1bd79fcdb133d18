"""Open and closed loop, and how they are stopped."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import pytest

from kvrelay.errors import Unavailable
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.runner import run_closed_loop, run_load
from kvrelay.loadtest.stopwatch import Stopwatch
from kvrelay.loadtest.workload import PlannedRequest


def request(at: float = 0.0, seed: int = 0) -> PlannedRequest:
    return PlannedRequest(at, "p", None, 1, seed)


class Server:
    """Answers with one token when it is let."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most = 0
        self.sent: list[PlannedRequest] = []
        self.gate = asyncio.Semaphore(0)

    async def send(self, request: PlannedRequest, start: float) -> Row:
        watch = Stopwatch(start, request.at)
        self.sent.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.gate.acquire()
        finally:
            self.under_way -= 1
        watch.tokens(1)
        return watch.answered(prompt_tokens=request.seed)


async def test_a_closed_loop_keeps_its_slots_busy() -> None:
    server = Server()
    for _ in range(20):
        server.gate.release()
    rows = await run_closed_loop(
        [request(seed=n) for n in range(20)], 3, None, server, lambda _: None
    )
    assert [row.index for row in rows] == list(range(20))
    assert [row.prompt_tokens for row in rows] == list(range(20))
    assert server.most <= 3


async def test_a_closed_loop_never_has_more_under_way_than_slots() -> None:
    server = Server()
    loop = asyncio.create_task(run_closed_loop([request()] * 9, 4, None, server, lambda _: None))
    for released in range(9):
        while server.under_way != min(4, 9 - released):
            await asyncio.sleep(0)
        server.gate.release()
    assert len(await loop) == 9
    assert server.most == 4


async def test_in_a_closed_loop_a_request_is_due_when_its_slot_is_free() -> None:
    server = Server()
    loop = asyncio.create_task(
        run_closed_loop([request(), request()], 1, None, server, lambda _: None)
    )
    for released in range(2):
        while len(server.sent) == released:
            await asyncio.sleep(0)
        server.gate.release()
    first, second = await loop
    assert first.scheduled_s == 0.0
    assert first.e2e_s is not None
    assert second.scheduled_s >= first.scheduled_s + first.e2e_s
    assert second.ttft_s is not None
    assert second.ttft_s >= second.late_s >= 0


async def test_a_closed_loop_ends_after_its_duration() -> None:
    """The plan has no end; the duration is over before the first answer."""
    server = Server()
    server.gate.release()
    endless = (request(seed=n) for n in count())
    assert len(await run_closed_loop(endless, 1, 1e-9, server, lambda _: None)) == 1


@pytest.mark.parametrize("closed", [False, True])
async def test_stopping_keeps_what_has_ended(closed: bool) -> None:
    server, stop = Server(), asyncio.Event()
    done: list[Row] = []

    def note(row: Row) -> None:
        done.append(row)
        if len(done) == 2:
            stop.set()

    plan = [request(seed=0), request(seed=1), request(seed=2), request(at=3600.0, seed=3)]
    server.gate.release()
    server.gate.release()
    if closed:
        rows = await run_closed_loop(plan, 2, None, server, note, stop)
    else:
        rows = await run_load(plan, server, note, stop)
    assert [row.prompt_tokens for row in rows] == [0, 1]
    assert server.under_way == 0  # what was under way is cancelled


async def test_a_late_generator_shows_in_every_latency() -> None:
    server = Server()
    server.gate.release()

    async def busy() -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - the generator's own process has no time

    hog = asyncio.create_task(busy())
    (row,) = await run_load([request(at=0.01)], server, lambda _: None)
    await hog
    assert row.late_s >= 0.02
    assert row.ttft_s is not None
    assert row.ttft_s >= row.late_s


class Dead:
    """Refuses at once, from the given request on."""

    def __init__(self, good: int = 0) -> None:
        self.good = good
        self.sent = 0

    async def send(self, request: PlannedRequest, start: float) -> Row:
        self.sent += 1
        watch = Stopwatch(start, request.at)
        if self.sent > self.good:
            return watch.failed(Unavailable("connection refused"))
        watch.tokens(1)
        return watch.answered()


async def test_a_closed_loop_does_not_spin_on_a_dead_target() -> None:
    endless = (request(seed=n) for n in count())
    rows = await run_closed_loop(endless, 2, 0.5, Dead(good=10), lambda _: None)
    assert 12 <= len(rows) <= 10 + 2 * 3  # each slot: at once, after 0.1 s, after 0.3 s
    assert [row.ok for row in rows] == [True] * 10 + [False] * (len(rows) - 10)


async def test_a_failure_has_its_time() -> None:
    (row,) = await run_load([request(at=0.02)], Dead(), lambda _: None)
    assert row.e2e_s is not None
    assert row.e2e_s >= row.late_s >= 0
    assert Report({}, (), (row,)).duration_s >= 0.02
