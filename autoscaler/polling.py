"""Polling of the registry that survives outages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from structlog.typing import FilteringBoundLogger

from kvrelay.errors import Unavailable


async def poll_regularly(
    poll: Callable[[], Awaitable[None]],
    interval_s: float,
    log: FilteringBoundLogger,
    sooner: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Calls `poll` at the interval until cancelled. Logs an unavailable registry once; any other
    error ends the polling.

    sooner: returns when the next poll should start before the interval is over.
    """
    answered = True
    while True:
        try:
            await poll()
            answered = True
        except Unavailable as error:
            if answered:
                log.warning("registry_unavailable", reason=error.message)
            answered = False
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await (asyncio.sleep(interval_s) if sooner is None else sooner())
