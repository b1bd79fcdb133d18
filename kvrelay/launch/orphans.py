"""Kills forked workers that outlive their actors. A process that is frozen (SIGSTOP) cannot end by
itself.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

# From the end of an actor to the end of its worker; longer than a worker that can run needs.
KILL_S = 10.0


class Orphans:
    """The workers of one template process, watched between two connections of actors."""

    def __init__(
        self, listener: int, when_readable: Mapping[int, Callable[[], None]] | None = None
    ) -> None:
        """listener: the file descriptor of the socket that actors connect to. when_readable: what
        is called when other descriptors are readable.
        """
        self._listener = listener
        self._when_readable = when_readable or {}
        self._poll = select.poll()
        for descriptor in (listener, *self._when_readable):
            self._poll.register(descriptor, select.POLLIN)
        # Each actor's descriptor (see pidfd_open), and that of its worker
        self._workers: dict[int, int] = {}
        # When to kill, and the worker's descriptor; the earliest first
        self._left: deque[tuple[float, int]] = deque()

    def watch(self, actor: int, worker: int) -> None:
        """Watches a worker and its actor, given their process ids. A worker whose actor cannot be
        watched is left alone.
        """
        try:
            worker_fd = os.pidfd_open(worker)
        except OSError:
            return
        try:
            actor_fd = os.pidfd_open(actor)
        except ProcessLookupError:
            self._left.append((time.monotonic() + KILL_S, worker_fd))
            return
        except OSError:
            # The actor is of another namespace, or no more files may be open: it may be alive.
            os.close(worker_fd)
            return
        self._workers[actor_fd] = worker_fd
        self._poll.register(actor_fd, select.POLLIN)

    def wait(self) -> None:
        """Kills workers whose time is over, until an actor connects."""
        while True:
            while self._left and self._left[0][0] <= time.monotonic():
                self._kill(self._left.popleft()[1])
            timeout_ms = None
            if self._left:
                timeout_ms = 1000 * max(0.0, self._left[0][0] - time.monotonic()) + 1
            ready = [fd for fd, _ in self._poll_until_told(timeout_ms)]
            for fd in ready:
                if fd in self._when_readable:
                    self._when_readable[fd]()
                if fd in self._workers:
                    self._poll.unregister(fd)
                    os.close(fd)
                    self._left.append((time.monotonic() + KILL_S, self._workers.pop(fd)))
            if self._listener in ready:
                return

    def _poll_until_told(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        """Polls, and lets a SIGTERM through that the template blocks. Elsewhere it could come
        between two steps of a change, and a worker would be forgotten.
        """
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            return self._poll.poll(timeout_ms)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def kill_all(self) -> None:
        """Kills at once the workers whose actors have ended."""
        ended = [fd for fd, _ in self._poll.poll(0) if fd in self._workers]
        for fd in ended:
            self._kill(self._workers.pop(fd))
        while self._left:
            self._kill(self._left.popleft()[1])

    def _kill(self, worker_fd: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker_fd, signal.SIGKILL)
        os.close(worker_fd)
