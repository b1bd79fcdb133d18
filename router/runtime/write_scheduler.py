"""The order in which streams write to their clients."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 16


class WriteScheduler:
    """Wakes waiting writers in their order, a few per round of the event loop.

    Between two rounds the event loop reads the workers' messages. A waiting stream sends all its
    new tokens in a single message. So messages get larger under load, and reading is never delayed.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def queue(self, waiter: asyncio.Future[None]) -> None:
        """Queues a writer. The waiter's result is set when its turn comes."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._waiting.append(waiter)

    def _take_turn(self) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            waiter = self._waiting.popleft()
            # The reader may have been cancelled.
            if not waiter.done():
                waiter.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
