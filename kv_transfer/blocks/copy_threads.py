"""Threads that access KV, which the caller must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvrelay.process.uninterrupted import to_its_end

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but returns only after the thread has finished, even if
    cancelled.
    """
    return await to_its_end(asyncio.to_thread(function, *args, **kwargs))
