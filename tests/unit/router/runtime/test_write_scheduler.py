from __future__ import annotations

import asyncio

from router.runtime.write_scheduler import PER_TURN, WriteScheduler


async def test_some_in_each_turn_of_the_loop_in_their_order() -> None:
    write_scheduler = WriteScheduler()
    loop = asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(2 * PER_TURN + 1)]
    waiters[1].cancel()  # its reader has gone
    for one in waiters:
        write_scheduler.queue(one, "a")
    done = []
    for _ in range(4):
        done.append(sum(one.done() for one in waiters))
        await asyncio.sleep(0)
    assert done == [1, PER_TURN, 2 * PER_TURN, 2 * PER_TURN + 1]


async def test_who_comes_later_gets_a_turn_too() -> None:
    write_scheduler = WriteScheduler()
    for _ in range(2):
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        write_scheduler.queue(waiter, "a")
        async with asyncio.timeout(60):
            await waiter


async def test_a_tenant_with_one_writer_does_not_wait_for_another_tenants_writers() -> None:
    write_scheduler = WriteScheduler()
    loop = asyncio.get_running_loop()
    many = [loop.create_future() for _ in range(10 * PER_TURN)]
    only = loop.create_future()
    for one in many:
        write_scheduler.queue(one, "many")
    write_scheduler.queue(only, "few")
    await asyncio.sleep(0)
    assert only.done()
    assert sum(one.done() for one in many) == PER_TURN - 1
