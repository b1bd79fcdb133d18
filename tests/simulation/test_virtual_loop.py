from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from simulation.virtual_loop import Process, Stuck, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop(random.Random(0))
    yield made
    made.end()


async def _tick(times: list[float], loop: VirtualLoop) -> None:
    while True:
        times.append(loop.time())
        await asyncio.sleep(1)


def test_an_hour_takes_no_time(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600


def test_waiting_for_nothing_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())


def test_a_frozen_process_goes_on_where_it_was(loop: VirtualLoop) -> None:
    process, times = Process(loop, "one"), list[float]()
    process.spawn(_tick(times, loop))
    loop.call_later(1.5, process.freeze)
    loop.call_later(5.5, process.thaw)
    loop.run_until_complete(asyncio.sleep(8))
    assert times == [0, 1, 5.5, 6.5, 7.5]


def test_a_killed_process_runs_no_line_more(loop: VirtualLoop) -> None:
    process, lines = Process(loop, "one"), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(2)
        finally:
            lines.append("cleaned up")

    process.spawn(work())
    loop.call_later(1, process.kill)
    loop.run_until_complete(asyncio.sleep(5))
    assert lines == []


def test_children_belong_to_their_process(loop: VirtualLoop) -> None:
    process, times = Process(loop, "one"), list[float]()

    async def parent() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_tick(times, loop))

    process.spawn(parent())
    loop.call_later(2.5, process.kill)
    loop.run_until_complete(asyncio.sleep(9))
    assert times == [0, 1, 2]


def test_a_thread_takes_time_and_no_thread(loop: VirtualLoop) -> None:
    process = Process(loop, "one")

    async def work() -> tuple[int, float]:
        result = await loop.run_in_executor(ThreadPoolExecutor(1), lambda: 7)
        return result, await asyncio.to_thread(loop.time)

    result, time = loop.run_until_complete(process.spawn(work()))
    assert result == 7
    assert 0 < time <= loop.time()


def test_each_process_has_a_clock_of_its_own(loop: VirtualLoop) -> None:
    here, there = Process(loop, "one"), Process(loop, "two", clock_offset=100.0)
    loop.run_until_complete(asyncio.sleep(1))
    assert (here.now(), there.now()) == (1.0, 101.0)


def test_an_error_that_nobody_takes_is_kept(loop: VirtualLoop) -> None:
    def fail() -> None:
        raise ValueError("oh")

    loop.call_soon(fail)
    loop.run_until_complete(asyncio.sleep(1))
    assert "oh" in loop.failures[0]
