"""Bound on the event loop time for reading clients' data. Data that arrives at the same time is
read in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

# Reading time in each round of the event loop.
SLICE_S = 0.0002

Read = Callable[[], None]


class ReadTurns:
    """Read turns of one listener. Data that arrives after a round's time is used up waits for a
    later round.

    Clients take turns with one read each, however many connections a client has. A client's own
    reads run in their order of arrival.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._loop = asyncio.get_running_loop()
        # The client whose turn is next comes first.
        self._waiting: OrderedDict[Hashable, deque[Read]] = OrderedDict()
        self._began = 0.0
        # The start of the next round.
        self._round: asyncio.Handle | None = None

    def take(self, who: Hashable, read: Read) -> bool:
        """Calls read() now or in a later round. Returns whether it has been called."""
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
