"""Reaps the ended workers of a template process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from kvrelay.process.child import signal_name
from kvrelay.process.telemetry import get_logger

# Bytes of signals that are read at once.
_MOST_SIGNALS = 4096

log = get_logger("launch")


class Reaper:
    """Tells by a descriptor that a child has ended, so that it is reaped outside of the signal
    handler: a handler that logs may interrupt itself while it holds the log's lock.
    """

    def __init__(self) -> None:
        """Handles SIGCHLD of this process from now on."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # A handler of Python, so that the descriptor is written to.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a child may have ended."""
        return self._read

    def reap(self) -> None:
        """Reaps all ended children, and logs the signal that killed one."""
        with suppress(BlockingIOError):
            while os.read(self._read, _MOST_SIGNALS):
                pass
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if os.WIFSIGNALED(status):
                    log.warning("worker_killed", pid=pid, signal=signal_name(os.WTERMSIG(status)))

    def close(self) -> None:
        """Handles SIGCHLD no more. A forked process calls this: the descriptors are its parent's
        too.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
