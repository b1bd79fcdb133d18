"""Prefetch: waits for the next item while the caller processes the current one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def prefetch(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yields the same items, and waits for the next item while the caller processes one. Prefetches
    one item at most.
    """
    coming = asyncio.ensure_future(_next(items))
    try:
        while item := await coming:
            coming = asyncio.ensure_future(_next(items))
            yield item[0]
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        if not coming.cancelled():
            coming.exception()


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    async for item in items:
        return (item,)
    return None
