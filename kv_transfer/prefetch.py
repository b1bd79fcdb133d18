"""Reading while working."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def ahead(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The same items; while the caller works on one, the next one is waited for, and no more than
    that.
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
