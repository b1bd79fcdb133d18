"""Stalls of an event loop: told apart from a machine that is busy, and with what was running."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


async def test_a_loop_that_is_kept_waiting_has_used_no_processor_time() -> None:
    async with measured() as stalls:
        threading.Event().wait(0.5)  # as when others have the processor
    assert stalls.counts.worst_s >= 0.45
    assert stalls.counts.worst_cpu_s < 0.3


async def test_the_thread_ends_with_the_measurement() -> None:
    async with measured():
        assert any(one.name == "loop stalls" for one in threading.enumerate())
    async with asyncio.timeout(30):
        while any(one.name == "loop stalls" for one in threading.enumerate()):
            await asyncio.sleep(0.01)
