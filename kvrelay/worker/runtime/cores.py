"""Reserves processor cores for a worker's engine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
import threading
from pathlib import Path

from kvrelay.process.telemetry import get_logger

# Between two looks at the engine thread, and the number of looks in a row at which it wants to run
# and has not, until it may use other cores.
POLL_S = 0.1
STARVED_LOOKS = 4

log = get_logger("worker.cores")


class Cores:
    """Cores reserved by lock files of this host and user. The kernel releases them when the process
    ends for any reason.

    A core is reserved by one engine only. If too few are free, or the folder of the locks belongs
    to another user, no core is reserved and the kernel places the engine.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"kvrelay-cores-{os.getuid()}"
        # Core -> file descriptor.
        self._locks: dict[int, int] = {}
        self._allowed = os.sched_getaffinity(0)
        # Id of the thread that called `pin`.
        self._thread: int | None = None
        with contextlib.suppress(PermissionError):
            folder.mkdir(mode=0o700, exist_ok=True)
            for core in sorted(os.sched_getaffinity(0)):
                if len(self._locks) < count:
                    self._take(core, folder)
        if len(self._locks) < count:
            self.release()

    @property
    def taken(self) -> frozenset[int]:
        """The reserved cores."""
        return frozenset(self._locks)

    def pin(self) -> None:
        """Binds the calling thread, and the threads that it starts later, to the reserved cores, if
        any.
        """
        if self._locks:
            os.sched_setaffinity(0, self._locks)
            self._thread = threading.get_native_id()

    async def watch(self) -> None:
        """Gives the cores up if other programs keep the bound thread from running. Runs until
        cancelled.

        The kernel can leave a bound thread waiting for many seconds when another program is bound
        to the same core, although other cores are idle.
        """
        looks, before = 0, -1
        while self._thread is not None:
            try:
                runs, ticks = _activity(self._thread)
            except OSError:
                # The thread has ended, and the worker is about to.
                break
            looks = looks + 1 if runs and ticks == before else 0
            before = ticks
            if looks >= STARVED_LOOKS:
                self._give_up()
            await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()

    def _give_up(self) -> None:
        log.warning(
            "engine_starved",
            cores=sorted(self._locks),
            reason="other programs use these cores; the engine may use all from now on",
        )
        for thread in map(int, os.listdir("/proc/self/task")):
            # A thread may end meanwhile.
            with contextlib.suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) == self._locks.keys():
                    os.sched_setaffinity(thread, self._allowed)
        self._thread = None
        self.release()

    def release(self) -> None:
        """Releases the cores."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def _take(self, core: int, folder: Path) -> None:
        descriptor = os.open(
            folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            self._locks[core] = descriptor


def _activity(thread: int) -> tuple[bool, int]:
    """Returns whether a thread of this process runs or wants to run, and the CPU time that it has
    used, in clock ticks (proc(5), /proc/pid/stat).
    """
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "R", int(fields[11]) + int(fields[12])
