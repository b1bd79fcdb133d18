"""How a part of a cluster is asked to end: first in peace, then at once."""

from __future__ import annotations

import asyncio
import signal

DRAIN_GRACE_S = 30.0  # for what is in flight to end by itself


class StopRequest:
    """SIGTERM or SIGINT, or a call: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.halt = asyncio.Event()

    def __call__(self) -> None:
        (self.halt if self.drain.is_set() else self.drain).set()

    def now(self) -> None:
        """As both together."""
        self.drain.set()
        self.halt.set()

    def install(self) -> None:
        """To be called in the main thread, on its running loop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self)
