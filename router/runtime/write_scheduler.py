"""The order in which streams write to their clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

PER_TURN = 16


class WriteScheduler:
    """Wakes waiting writers, a few per round of the event loop: one of each tenant in turn.

    Between two rounds the event loop reads the workers' messages. A waiting stream sends all its
    new tokens in a single message. So messages get larger under load, and reading is never delayed.
    """

    def __init__(self) -> None:
        # By tenant. The tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def queue(self, waiter: asyncio.Future[None], tenant: str) -> None:
        """Queues a writer. The waiter's result is set when its turn comes."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
        waiters = self._waiting.get(tenant)
        if waiters is None:
            self._waiting[tenant] = deque((waiter,))
        else:
            waiters.append(waiter)

    def _take_turn(self) -> None:
        for _ in range(PER_TURN):
            if not self._waiting:
                return
            tenant, waiters = self._waiting.popitem(last=False)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[tenant] = waiters
            # The reader may have been cancelled.
            if not waiter.done():
                waiter.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._take_turn)
