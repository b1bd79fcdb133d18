"""Work that touches KV and must not be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but returns only once the thread is done with it, cancelled or
    not.
    """
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))


async def to_its_end(coroutine: Coroutine[object, object, T]) -> T:
    """What it returns, once it is done, cancelled or not.

    So whoever awaits this knows that the blocks are no longer touched. A cancellation takes effect
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
        work.exception()  # seen: the caller does not want to know any more
        raise cancelled
    return work.result()
