"""How long the bodies of requests may keep the event loop: those that come at one moment are read by turns."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.003  # of each round of the event loop

Read = Callable[[bytes], None]


class ReadTurns:
    """Of one listener. What comes while a round's time is up waits for a later round, in the order of its coming."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Read, bytes]] = deque()
        self._began = 0.0
        self._round: asyncio.Handle | None = None  # at which the next one begins

    def read(self, read: Read, data: bytes) -> bool:
        """Calls read(data) now or later; whether it has been called."""
        if self._round is None:
            self._began = self._now()
            self._round = self._loop.call_soon(self._begin)
        if self._waiting or self._now() - self._began > SLICE_S:
            self._waiting.append((read, data))
            return False
        read(data)
        return True

    def _begin(self) -> None:
        self._round = None
        if not self._waiting:
            return
        self._began = self._now()
        self._round = self._loop.call_soon(self._begin)
        while self._waiting:
            read, data = self._waiting.popleft()
            read(data)
            if self._now() - self._began > SLICE_S:
                break
