"""Writes log lines to stderr, so that logging never blocks on a pipe that is not read."""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress

# Most lines in the queue; further lines are dropped and counted.
MAX_LINES = 10_000
# Time for the remaining lines when the process ends.
FLUSH_S = 1.0
# A character takes at most 4 bytes, or an escape of 10 characters.
_MOST_CHARACTERS = select.PIPE_BUF // 10 - 1


class LogWriter:
    """A logger for structlog to wrap. Each method takes one complete line, which a separate thread
    writes.
    """

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # A fork copies the lock as it is, and not the thread that would release it.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._changed = threading.Condition()
        self._thread = None
        self._writing = False
        # The parent writes them.
        self._lines.clear()
        self._dropped = 0

    def info(self, line: str) -> None:
        """Queues a line without blocking. Drops the line if the queue is full."""
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._dropped += 1
                return
            self._lines.append(line)
            # No thread yet: this is the first line, or the first in a forked process.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            self._changed.notify_all()

    debug = warning = error = critical = info

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Waits until every line is written, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                lines, dropped = list(self._lines), self._dropped
                self._lines.clear()
                self._dropped = 0
                self._writing = True
            try:
                _write("".join(f"{line}\n" for line in (*lines, *_told(dropped))))
            # The reader is gone, the disk is full, or the stream is closed.
            except (OSError, ValueError):
                with self._changed:
                    self._dropped += dropped + len(lines)


class DirectLogWriter:
    """A logger for structlog to wrap, in a process that must have no other thread. A line is lost
    if stderr cannot take it at once, and cut to what a pipe takes at once.
    """

    def info(self, line: str) -> None:
        """Writes a line without blocking."""
        with suppress(OSError, ValueError):
            descriptor = _descriptor()
            if descriptor < 0 or select.select([], [descriptor], [], 0)[1]:
                _write(f"{line:.{_MOST_CHARACTERS}}\n")

    debug = warning = error = critical = info


def _told(dropped: int) -> list[str]:
    said = {
        "level": "warning",
        "event": "log_lines_dropped",
        "component": "log",
        "lines": dropped,
    }
    return [json.dumps(said)] if dropped else []


def _descriptor() -> int:
    """Returns the file descriptor of stderr; -1 if there is none."""
    try:
        return -1 if sys.stderr is None else sys.stderr.fileno()
    except (OSError, ValueError):
        # A replacement stream without a file.
        return -1


def _write(text: str) -> None:
    """Writes to the file descriptor, without the stream's buffer. If the write never returned, the
    buffer's lock would block the exit of the interpreter.
    """
    descriptor = _descriptor()
    if descriptor < 0:
        if sys.stderr is not None:
            sys.stderr.write(text)
        return
    left = text.encode("utf-8", "backslashreplace")
    while left:
        left = left[os.write(descriptor, left) :]
