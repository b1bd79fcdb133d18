"""Ctrl-C while a command runs a cluster, which takes seconds to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvrelay.cli.terminal.notes import note

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `asyncio.run`. Ctrl-C is confirmed at once. It cancels `main`, and
    raises KeyboardInterrupt when that has ended.
    """
    interrupts = 0

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupted() -> None:
            nonlocal interrupts
            interrupts += 1
            if interrupts == 1:
                note("stopping")
            task.cancel()

        # A shell starts background jobs with SIGINT ignored, and they stay so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)
        return await main

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
