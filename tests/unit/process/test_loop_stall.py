"""Stalls of an event loop: told apart from a machine that is busy, and with what was running."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from structlog.testing import capture_logs

from kvrelay.process.loop_stall import BUCKETS, SAMPLE_S, LoopStalls


@asynccontextmanager
async def measured(beat_s: float = 0.01) -> AsyncIterator[LoopStalls]:
    stalls = LoopStalls("test", beat_s)
    task = asyncio.create_task(stalls.run())
    await asyncio.sleep(0)
    try:
        yield stalls
        beats = sum(stalls.counts.buckets)
        async with asyncio.timeout(30):
            while sum(stalls.counts.buckets) < beats + 2:  # what came before has been counted
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def compute_without_pause(seconds: float) -> None:
    """So much of this thread's processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_what_computes_on_the_loop_is_counted_and_named() -> None:
    with capture_logs() as lines:
        async with measured() as stalls:
            compute_without_pause(SAMPLE_S + 0.4)
    counts = stalls.counts
    assert counts.worst_cpu_s >= SAMPLE_S + 0.4
    assert counts.worst_s >= SAMPLE_S + 0.3
    assert sum(counts.buckets[BUCKETS.index(0.5) :]) >= 1
    told = [line for line in lines if line["event"] == "event_loop_stalled"]
    assert told[0]["process"] == "test"
    assert told[0]["cpu_seconds"] >= SAMPLE_S
    assert "compute_without_pause test_loop_stall.py" in told[0]["stack"]
    assert "compute_without_pause" in counts.stack


async def test_a_callback_that_blocks_stalls_and_has_used_no_processor_time() -> None:
    with capture_logs() as lines:
        async with measured() as stalls:
            threading.Event().wait(0.5)
    assert "event_loop_stalled" in {line["event"] for line in lines}
    assert stalls.counts.worst_s >= 0.45
    assert stalls.counts.worst_cpu_s < 0.3


async def test_a_garbage_collection_is_told_apart() -> None:
    alive = [[number] for number in range(200_000)]
    with capture_logs() as lines:
        async with measured():
            threading.Event().wait(0.5)
            gc.collect()
        async with measured():
            threading.Event().wait(0.5)
    assert len(alive) == 200_000
    told = [line for line in lines if line["event"] == "event_loop_stalled"]
    assert 0 < told[0]["garbage_collection_seconds"] <= told[0]["cpu_seconds"]
    assert told[0]["garbage_collection_seconds"] > told[-1]["garbage_collection_seconds"]


@contextmanager
def busy_core(programs: int) -> Iterator[None]:
    """Lets this thread and busy programs share one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    command = ["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(programs):
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        # Of this thread alone.
        os.sched_setaffinity(0, {core})
        stack.callback(os.sched_setaffinity, 0, before)
        yield


async def test_a_loop_that_gets_no_core_is_not_stalled_by_its_code() -> None:
    with capture_logs() as lines, busy_core(7):
        async with measured() as stalls:
            # As long as there is too little of it for a stall.
            compute_without_pause(SAMPLE_S * 0.6)
    counts = stalls.counts
    assert counts.waited_s > SAMPLE_S
    assert counts.worst_s < SAMPLE_S
    events = {line["event"] for line in lines}
    assert "event_loop_stalled" not in events
    assert "event_loop_got_no_core" in events


async def test_the_thread_ends_with_the_measurement() -> None:
    async with measured():
        assert any(one.name == "loop stalls" for one in threading.enumerate())
    async with asyncio.timeout(30):
        while any(one.name == "loop stalls" for one in threading.enumerate()):
            await asyncio.sleep(0.01)
