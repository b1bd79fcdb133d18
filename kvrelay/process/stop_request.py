"""Asks a component to end: first with a drain, then at once."""

from __future__ import annotations

import asyncio
import signal

# Time for requests in progress to finish.
DRAIN_GRACE_S = 30.0


class StopRequest:
    """A stop request by SIGTERM, SIGINT or a call. The first asks for a drain, the second for an
    immediate end.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.halt = asyncio.Event()

    def __call__(self) -> None:
        (self.halt if self.drain.is_set() else self.drain).set()

    def now(self) -> None:
        """Requests the drain and the immediate end together."""
        self.drain.set()
        self.halt.set()

    def install(self) -> None:
        """Installs the signal handlers. Call this in the main thread, on its running loop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self)
