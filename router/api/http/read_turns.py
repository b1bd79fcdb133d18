"""How long what clients send may keep the event loop: what comes at one moment is read by turns."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

SLICE_S = 0.001  # of each round of the event loop

Read = Callable[[], None]


class ReadTurns:
    """Of one listener. What comes while a round's time is up waits for a later round.

    Then each of those who wait has a read in turn, however many connections it has; its own are in
    the order of their coming.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._loop = asyncio.get_running_loop()
        # Whose turn it is comes first
        self._waiting: OrderedDict[Hashable, deque[Read]] = OrderedDict()
        self._began = 0.0
        self._round: asyncio.Handle | None = None  # at which the next one begins

    def take(self, who: Hashable, read: Read) -> bool:
        """Calls read() now or later; whether it has been called."""
        if self._round is None:
            self._began = self._now()
            self._round = self._loop.call_soon(self._begin)
        if self._waiting or self._now() - self._began > SLICE_S:
            self._waiting.setdefault(who, deque()).append(read)
            return False
        read()
        return True

    def _begin(self) -> None:
        self._round = None
        if not self._waiting:
            return
        self._began = self._now()
        self._round = self._loop.call_soon(self._begin)
        while self._waiting:
            self._next()()
            if self._now() - self._began > SLICE_S:
                break

    def _next(self) -> Read:
        who, reads = self._waiting.popitem(last=False)
        read = reads.popleft()
        if reads:
            self._waiting[who] = reads
        return read
