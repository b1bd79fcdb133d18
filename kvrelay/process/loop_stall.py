"""Measures how long an event loop is blocked, and by what."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field

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
    """The lateness of all beats, in seconds."""

    # The last bucket is for all larger values.
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total_s: float = 0.0
    worst_s: float = 0.0
    # CPU time of the loop's thread between two beats.
    worst_cpu_s: float = 0.0
    # Stack of the loop's thread in the last stall that was long enough to be sampled.
    stack: str = ""

    def add(self, late_s: float, cpu_s: float) -> None:
        """Counts one beat: its lateness, and the CPU time of the loop's thread since the previous
        beat.
        """
        self.buckets[bisect_left(BUCKETS, late_s)] += 1
        self.total_s += late_s
        self.worst_s = max(self.worst_s, late_s)
        self.worst_cpu_s = max(self.worst_cpu_s, cpu_s)


class LoopStalls:
    """Measures the event loop that `run` runs on.

    A callback is due every BEAT_S; other callbacks delay it by their own duration. The CPU time of
    the loop's thread is recorded beside the wall time. On a busy machine a beat can be late
    although no callback took long; then only the wall time is large. A watchdog thread samples the
    loop's stack during a stall, if the interpreter's lock is free.
    """

    def __init__(self, process: str, beat_s: float = BEAT_S) -> None:
        """`process` is the name in the log."""
        self.counts = StallCounts()
        self._process = process
        self._beat_s = beat_s
        self._due = 0.0
        self._cpu = 0.0
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
        self._due, self._cpu = time.monotonic() + self._beat_s, time.thread_time()
        self._handle = loop.call_later(self._beat_s, self._beat, loop)
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._handle.cancel()
            self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        late_s, cpu_s = max(0.0, now - self._due), cpu - self._cpu
        self.counts.add(late_s, cpu_s)
        stack, self._sampled = self._sampled, None
        if late_s >= SAMPLE_S:
            self.counts.stack = stack or ""
            log.warning(
                "event_loop_stalled",
                process=self._process,
                seconds=round(late_s, 3),
                cpu_seconds=round(cpu_s, 3),
                stack=stack or "unavailable: the global interpreter lock was held",
            )
        self._due, self._cpu = now + self._beat_s, cpu
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
