"""Looking at the registry as soon as something changes there, and not only at the next poll."""

from __future__ import annotations

import asyncio

from kvrelay.errors import Unavailable
from router.runtime.driver import Driver
from router.runtime.worker_directory import RouterRegistry

AGAIN_S = 1.0  # until the next try to listen, while the registry is away


async def follow_changes(registry: RouterRegistry, driver: Driver) -> None:
    """Until cancelled. While nothing can be heard, the driver polls."""
    while True:
        try:
            async for _ in registry.changes():
                driver.look_soon()
        except Unavailable:
            await asyncio.sleep(AGAIN_S)
