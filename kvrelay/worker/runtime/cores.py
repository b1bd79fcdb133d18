"""Reserves processor cores for a worker's engine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path


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
