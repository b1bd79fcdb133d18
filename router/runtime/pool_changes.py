"""Early polls of the registry when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.errors import Unavailable
from router.runtime.worker_directory import RouterRegistry

# Pause before the next subscription while the registry is unavailable.
AGAIN_S = 1.0


async def follow_changes(registry: RouterRegistry, *look_soon: Callable[[], None]) -> None:
    """Requests early polls for each change in the registry, until cancelled. While the
    subscription fails, the regular polls continue.
    """
    while True:
        try:
            async for _ in registry.changes():
                for look in look_soon:
                    look()
        except Unavailable:
            await asyncio.sleep(AGAIN_S)
