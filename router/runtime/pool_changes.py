"""Early polls of the registry when it changes."""

from __future__ import annotations

import asyncio

from kvrelay.errors import Unavailable
from router.runtime.driver import Driver
from router.runtime.worker_directory import RouterRegistry

# Pause before the next subscription while the registry is unavailable.
AGAIN_S = 1.0


async def follow_changes(registry: RouterRegistry, driver: Driver) -> None:
    """Requests an early poll for each change in the registry, until cancelled. While the
    subscription fails, the driver's regular polls continue.
    """
    while True:
        try:
            async for _ in registry.changes():
                driver.look_soon()
        except Unavailable:
            await asyncio.sleep(AGAIN_S)
