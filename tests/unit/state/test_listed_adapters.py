"""The list of adapters in Redis, which several routers change at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import AdapterEntry

SQL = AdapterEntry("sql", "/a/sql", "a" * 32)
OTHER = replace(SQL, path="/b/sql", adapter_id="b" * 32)
SERVED = replace(SQL, served=True)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as connected:
        yield connected


async def test_an_adapter_is_listed_before_it_is_served(registry: Registry) -> None:
    assert not await registry.put_adapter(SERVED)
    assert await registry.put_adapter(SQL)
    assert await registry.adapters() == (SQL,)
    assert await registry.put_adapter(SERVED)
    assert await registry.put_adapter(SQL), "another router loads it, too"
    assert await registry.adapters() == (SERVED,)
    await registry.remove_adapter("sql")
    assert await registry.adapters() == ()


async def test_a_name_keeps_its_files(registry: Registry) -> None:
    assert await registry.put_adapter(SQL)
    for other in (OTHER, replace(OTHER, served=True), replace(SQL, path="/c")):
        assert not await registry.put_adapter(other)
        await registry.withdraw_adapter(other)
    assert await registry.adapters() == (SQL,)
    await registry.withdraw_adapter(SQL)
    assert await registry.adapters() == ()


async def test_an_adapter_that_is_served_is_not_withdrawn(registry: Registry) -> None:
    await registry.put_adapter(SQL)
    await registry.put_adapter(SERVED)
    await registry.withdraw_adapter(SQL)
    assert await registry.adapters() == (SERVED,)


async def test_one_of_many_wins(registry: Registry) -> None:
    entries = [replace(SQL, path=f"/{number}") for number in range(20)]
    assert sum(await asyncio.gather(*map(registry.put_adapter, entries))) == 1


@pytest.mark.parametrize("raw", ["", "x", "[1]", '{"schema": 1, "value": 7}', "null"])
async def test_damaged_entries_do_not_stay_in_the_way(registry: Registry, raw: str) -> None:
    await registry._call("HSET", registry._keys.adapters, "sql", raw)
    await registry.withdraw_adapter(SQL)
    assert not await registry.put_adapter(SERVED)
    assert await registry.put_adapter(SQL)
    assert await registry.adapters() == (SQL,)


async def test_each_change_is_announced(registry: Registry) -> None:
    seen = 0

    async def count() -> None:
        nonlocal seen
        async for _ in registry.changes():
            seen += 1

    async def reaches(number: int) -> None:
        async with asyncio.timeout(60):
            while seen < number:
                await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    async with asyncio.timeout(60):
        # The first ones are lost until the subscription has begun.
        while not seen:
            await registry.announce_change()
            await asyncio.sleep(0.05)
    sent = seen
    for change in (
        registry.put_adapter(SQL),
        registry.put_adapter(SERVED),
        registry.remove_adapter("sql"),
        registry.put_adapter(SQL),
        registry.withdraw_adapter(SQL),
    ):
        await change
        sent += 1
        await reaches(sent)
    counting.cancel()
