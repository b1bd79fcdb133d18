"""Waiting for work that must not be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(running: Awaitable[T]) -> T:
    """Like `await running`, but cancellations take effect only when `running` has ended."""
    task = asyncio.ensure_future(running)
    cancelled: asyncio.CancelledError | None = None
    try:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return task.result()
        if not task.cancelled():
            # asyncio logs errors that nobody has looked at.
            task.exception()
        raise cancelled
    finally:
        # The traceback of an exception refers to this frame, and the task refers to the exception.
        # The reference cycle would keep their memory.
        del running, task, cancelled
