"""The wait before a retry. Cancelling a stream or closing the client ends it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from kvrelay.errors import KvRelayError

# Shorter waits are not told.
_TOLD_S = 1.0

log = logging.getLogger("kvrelay.client")


def tell(error: KvRelayError, seconds: float) -> None:
    """Logs why the client waits, if the wait is long enough to be noticed."""
    if seconds >= _TOLD_S:
        log.info("%s; asking again in %.0f s", error.message, seconds)


class BlockingPause:
    """The waits of a blocking client's threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Returns after `seconds`, or at a `wake` after which `ended` is true."""
        with self._changed:
            self._changed.wait_for(ended, seconds)

    def wake(self) -> None:
        """Makes all waits look at `ended`. Any thread may call this method."""
        with self._changed:
            self._changed.notify_all()


class AsyncPause:
    """The waits of an asyncio client's tasks."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def wait(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Returns after `seconds`, or at a `wake` after which `ended` is true."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not ended():
                    await self._changed.wait()

    def wake(self) -> None:
        """Makes all waits look at `ended`."""
        self._changed.set()
        self._changed = asyncio.Event()
