from __future__ import annotations

import asyncio
import threading

import pytest

from kv_transfer.blocks.copy_threads import in_thread


async def test_it_returns_and_raises_what_the_function_does() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_cancelled_it_waits_for_the_function(cancellations: int) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert go_on.wait(60)
        raise ValueError("nobody wants to know any more")

    task = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(started.wait, 10)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0.001)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
