"""Looking at the registry again and again, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from kvrelay.errors import Unavailable


async def look_regularly(
    look: Callable[[], Awaitable[None]], interval_s: float, log: FilteringBoundLogger, away: str
) -> None:
    """Until cancelled. That the registry does not answer is logged once, as `away`; any other error ends it."""
    answered = True
    while True:
        try:
            await look()
            answered = True
        except Unavailable as error:
            if answered:
                log.warning(away, reason=error.message)
            answered = False
        await asyncio.sleep(interval_s)
