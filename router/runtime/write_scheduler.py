"""Who may write next."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 16


class WriteScheduler:
    """Wakes those that wait to write in their order, a few in each turn of the event loop.

    Between them the loop takes in what came from the workers. A stream that waits for its turn
    sends all that came for it meanwhile in one message: messages get larger under load, and tokens
    are never late for want of reading.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def queue(self, waiter: asyncio.Future[None]) -> None:
        """Its result is set when its turn has come."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._waiting.append(waiter)

    def _take_turn(self) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            waiter = self._waiting.popleft()
            if not waiter.done():  # its reader may have gone
                waiter.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
