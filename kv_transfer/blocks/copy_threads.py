"""Threads that access KV, which the caller must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but returns only after the thread has finished, even if
    cancelled.
    """
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


async def to_its_end(coroutine: Coroutine[object, object, T]) -> T:
    """Returns the coroutine's result after it has finished, even if cancelled.

    When the await returns, the coroutine no longer touches the blocks. A cancellation takes effect
    afterwards.
    """
    work = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Marks the exception as retrieved: the cancelled caller does not need it.
        work.exception()
        raise cancelled
    return work.result()
