"""Lines of log on their way to stderr. A thread writes them: who logs never waits for a pipe that
nobody reads.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import deque

MAX_LINES = 10_000  # that wait; more are dropped and counted
FLUSH_S = 1.0  # for what is left when the process ends


class LogWriter:
    """A logger as structlog wraps it: each of its methods takes one whole line."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def info(self, line: str) -> None:
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._dropped += 1
                return
            self._lines.append(line)
            # The first line, or that of a forked process
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            self._changed.notify_all()

    debug = warning = error = critical = info

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Until every line is written, `seconds` at most."""
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
            # The reader has gone, the disk is full, the stream is closed
            except (OSError, ValueError):
                with self._changed:
                    self._dropped += dropped + len(lines)


def _told(dropped: int) -> list[str]:
    said = {
        "level": "warning",
        "event": "lines of log were dropped",
        "component": "log",
        "lines": dropped,
    }
    return [json.dumps(said)] if dropped else []


def _write(text: str) -> None:
    """Past the stream's buffer, whose lock would be held at the interpreter's end if the write
    never returned.
    """
    stream = sys.stderr
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stand-in without a file
        descriptor = -1
    if descriptor < 0:
        stream.write(text)
        return
    left = text.encode("utf-8", "backslashreplace")
    while left:
        left = left[os.write(descriptor, left) :]
