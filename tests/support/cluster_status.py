"""Waiting for what a cluster's status says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvrelay.wire.cluster import ClusterStatus


async def first_status(
    poll: Callable[[], Awaitable[ClusterStatus]],
    holds: Callable[[ClusterStatus], bool],
    what: str,
    seconds: float,
) -> ClusterStatus:
    """Of which `holds` is true; `what` is that in words."""
    status = await poll()
    try:
        async with asyncio.timeout(seconds):
            while not holds(status):
                await asyncio.sleep(0.1)
                status = await poll()
    except TimeoutError:
        raise AssertionError(f"{what}: still not so after {seconds:g} s: {status}") from None
    return status
