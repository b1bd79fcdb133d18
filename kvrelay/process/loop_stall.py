"""Measures how long an event loop is blocked, and by what."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import re
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field

from kvrelay.process.run_queue import RunQueueWait
from kvrelay.process.telemetry import get_logger

BEAT_S = 0.02
# Stall after which the stack of the loop's thread is sampled.
SAMPLE_S = 0.25
# Polling interval of the watchdog thread.
_POLL_S = 0.1
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_STACK_BYTES = 2**18
# Most frames of a stack in the log.
_FRAMES = 12
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds

log = get_logger("loop")


@dataclass(slots=True)
class StallCounts:
    """The lateness of all beats, in seconds, without the time in which the loop's thread waited for
    a core.
    """

    # The last bucket is for all larger values.
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total_s: float = 0.0
    worst_s: float = 0.0
    # CPU time of the loop's thread between two beats.
    worst_cpu_s: float = 0.0
    # Sum of the time in which the loop's thread waited for a core.
    waited_s: float = 0.0
    # Stack of the loop's thread in the last stall that was long enough to be sampled.
    stack: str = ""

    def add(self, late_s: float, cpu_s: float, waited_s: float) -> None:
        """Counts one beat: its lateness without waiting for a core, and since the previous beat the
        CPU time of the loop's thread and its time of waiting for a core.
        """
        self.buckets[bisect_left(BUCKETS, late_s)] += 1
        self.total_s += late_s
        self.worst_s = max(self.worst_s, late_s)
        self.worst_cpu_s = max(self.worst_cpu_s, cpu_s)
        self.waited_s += waited_s


class _Collections:
    """The CPU time of the garbage collector in this process, while the block is open. It holds the
    interpreter's lock.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        gc.callbacks.append(self._note)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


class LoopStalls:
    """Measures the event loop that `run` runs on.

    A callback is due every BEAT_S; other callbacks delay it by their own duration. On a busy
    machine a beat is also late when the loop's thread gets no core. The kernel measures that time,
    and it is no stall. The CPU time of the loop's thread is recorded beside the stall: a callback
    that blocks uses none. A watchdog thread samples the loop's stack during a stall, if the
    interpreter's lock is free.
    """

    def __init__(self, process: str, beat_s: float = BEAT_S) -> None:
        """`process` is the name in the log."""
        self.counts = StallCounts()
        self._process = process
        self._beat_s = beat_s
        self._due = 0.0
        self._cpu = self._waited = 0.0
        self._run_queue = RunQueueWait()
        self._collections = _Collections()
        self._collected = 0.0
        # The stack sampled in the current stall.
        self._sampled: str | None = None
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="loop stalls", daemon=True
        )
        with self._run_queue, self._collections:
            self._cpu, self._waited = time.thread_time(), self._run_queue.seconds()
            self._due = time.monotonic() + self._beat_s
            self._handle = loop.call_later(self._beat_s, self._beat, loop)
            thread.start()
            try:
                await asyncio.Event().wait()
            finally:
                self._handle.cancel()
                self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now, cpu, waited = time.monotonic(), time.thread_time(), self._run_queue.seconds()
        late_s, cpu_s = max(0.0, now - self._due), cpu - self._cpu
        waited_s = waited - self._waited
        stall_s = max(0.0, late_s - waited_s)
        self.counts.add(stall_s, cpu_s, waited_s)
        stack, self._sampled = self._sampled, None
        times = {
            "cpu_seconds": round(cpu_s, 3),
            "waited_for_core_seconds": round(waited_s, 3),
            "garbage_collection_seconds": round(self._collections.seconds - self._collected, 3),
        }
        if stall_s >= SAMPLE_S:
            self.counts.stack = stack or ""
            log.warning(
                "event_loop_stalled",
                process=self._process,
                seconds=round(stall_s, 3),
                **times,
                stack=stack or "unavailable: the global interpreter lock was held",
            )
        elif late_s >= SAMPLE_S:
            log.info(
                "event_loop_got_no_core", process=self._process, seconds=round(late_s, 3), **times
            )
        self._due, self._cpu, self._waited = now + self._beat_s, cpu, waited
        self._collected = self._collections.seconds
        self._handle = loop.call_later(self._beat_s, self._beat, loop)

    def _watch(self, ident: int) -> None:
        while not self._ended.wait(_POLL_S):
            if self._sampled is None and time.monotonic() - self._due > SAMPLE_S:
                self._sampled = _stack_of(ident)


def _stack_of(ident: int) -> str:
    """Returns the innermost frames of a running thread. Python code must not walk these frames,
    because they may end meanwhile.
    """
    file = os.memfd_create("stack")
    try:
        # faulthandler does not release the interpreter's lock.
        faulthandler.dump_traceback(file, all_threads=True)
        text = os.pread(file, _STACK_BYTES, 0).decode(errors="replace")
    finally:
        os.close(file)
    frames = _FRAME.findall(text.partition(f"hread 0x{ident:016x}")[2].partition("hread 0x")[0])
    return " < ".join(
        f"{name} {path.rpartition('/')[2]}:{line}" for path, line, name in frames[:_FRAMES]
    )
