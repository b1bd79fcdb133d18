"""Which processor cores a worker's engine has to itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path


class Cores:
    """Cores taken by lock files of this host and user: the kernel gives them back when the process
    ends, however.

    A core is taken by one engine only. Where too few are left, or the folder of the locks is
    another user's, none is taken and the engine runs where the kernel lets it.
    """

    def __init__(self, count: int, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"kvrelay-cores-{os.getuid()}"
        self._locks: dict[int, int] = {}  # core -> file descriptor
        with contextlib.suppress(PermissionError):
            folder.mkdir(mode=0o700, exist_ok=True)
            for core in sorted(os.sched_getaffinity(0)):
                if len(self._locks) < count:
                    self._take(core, folder)
        if len(self._locks) < count:
            self.release()

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._locks)

    def pin(self) -> None:
        """Binds the thread that calls it, and threads that it will start, to the cores taken, if
        any.
        """
        if self._locks:
            os.sched_setaffinity(0, self._locks)

    def release(self) -> None:
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
