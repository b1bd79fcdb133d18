"""The time that a thread waits for a core although it could run."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

_FILE = "/proc/thread-self/schedstat"
# Bytes of three numbers.
_SIZE = 64


class RunQueueWait:
    """Reads how long the calling thread has waited in the kernel's run queues since its start.
    Other programs, and a quota of the container, make a thread wait there. A blocking call and the
    interpreter's lock do not.

    A context manager that the thread itself enters. Without the kernel's statistics, the time is 0.
    """

    def __enter__(self) -> Self:
        try:
            self._file = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        return self

    def seconds(self) -> float:
        """Returns the seconds of waiting. Takes 2 us."""
        if self._file < 0:
            return 0.0
        # Nanoseconds on a core, nanoseconds in a run queue, number of time slices.
        return int(os.pread(self._file, _SIZE, 0).split()[1]) / 1e9

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
