from __future__ import annotations

import asyncio

from router.runtime.write_scheduler import PER_TURN, WriteScheduler


async def test_some_in_each_turn_of_the_loop_in_their_order() -> None:
    write_scheduler = WriteScheduler()
    loop = asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(2 * PER_TURN + 1)]
    waiters[1].cancel()  # its reader has gone
    for one in waiters:
        write_scheduler.queue(one)
    done = []
    for _ in range(4):
        done.append(sum(one.done() for one in waiters))
        await asyncio.sleep(0)
    assert done == [1, PER_TURN, 2 * PER_TURN, 2 * PER_TURN + 1]


async def test_who_comes_later_gets_a_turn_too() -> None:
    write_scheduler = WriteScheduler()
    for _ in range(2):
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        write_scheduler.queue(waiter)
        async with asyncio.timeout(60):
            await waiter
