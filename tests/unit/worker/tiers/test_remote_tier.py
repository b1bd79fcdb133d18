"""A remote tier whose stores are lost, slow, full, foreign or wrong: what comes back is what was
put, or nothing, and the reason is told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from support.stores import (
    BLOCK_BYTES,
    LAYOUT,
    Remote,
    StoreProcess,
    contents,
    key,
    remote,
    store,
    stored,
    until,
)
from support.tcp_proxy import TcpProxy, proxy_to

from kvrelay.kv_store import process
from kvrelay.kv_store.block_store import ENTRY_BYTES
from kvrelay.protocol_version import Protocol
from kvrelay.types.kv_block import tenant_folder
from kvrelay.wire.store import MAX_CALL_BLOCKS, StoreStatus
from kvrelay.worker.tiers import remote_tier, store_link
from kvrelay.worker.tiers.tier import StoredBlock

NUMBERS = range(40)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be busy. Pauses are short."""
    for name in ("_FIND_S", "_SILENCE_S", "_PUT_S", "_GET_S", "_STATUS_S"):
        monkeypatch.setattr(store_link, name, 30.0)
    monkeypatch.setattr(store_link, "_PAUSE_S", 0.05)
    monkeypatch.setattr(store_link, "_LONGEST_PAUSE_S", 0.1)


async def all_come_back(one: Remote, numbers: range = NUMBERS) -> None:
    keys = [key(number) for number in numbers]
    assert await one.tier.probe(keys) == len(keys)
    assert await one.read(*numbers) == [contents(number) for number in numbers]


async def test_what_one_worker_puts_another_one_gets() -> None:
    async with store() as (first, one), store() as (second, other):
        async with remote(first, second) as putter:
            await putter.opened()
            await putter.put(*map(stored, NUMBERS))
            assert putter.tier.counts.stored == len(NUMBERS)
        # Both have a share, and nobody has all.
        assert 0 < len(one) < len(NUMBERS)
        assert len(one) + len(other) == len(NUMBERS)
        async with remote(second, first) as getter:
            await getter.opened()
            await all_come_back(getter)
            # A block that another worker has put is not sent again.
            assert not getter.tier.touch(key(0)) or getter.tier.counts.stored == 0
            await getter.put(*map(stored, NUMBERS))
            assert getter.tier.counts.stored == 0
            assert one.stored + other.stored == len(NUMBERS)


async def test_a_prefix_ends_at_the_first_missing_block() -> None:
    async with store() as (first, one), store() as (second, other), remote(first, second) as tier:
        await tier.opened()
        await tier.put(*map(stored, NUMBERS))
        for blocks in (one, other):
            for name in [one for one in blocks._entries if one[1] == key(20).identity]:
                blocks.forget(name)
        keys = [key(number) for number in NUMBERS]
        # It has put all of them a short time ago, and does not ask.
        assert await tier.tier.probe(keys) == len(keys)
        # A read tells it.
        for _ in range(2):
            assert await tier.read(*NUMBERS) == [contents(number) for number in range(20)]
            assert await tier.tier.probe(keys) == 20
        async with remote(first, second) as another:
            await another.opened()
            assert await another.tier.probe(keys) == 20


async def test_blocks_of_other_layouts_and_tenants_are_never_found() -> None:
    async with store() as (address, held):
        async with remote(address) as tier:
            await (await tier.opened()).put(stored(1, "ann"), stored(2, "bob"))
        assert {tenant_folder("ann"), tenant_folder("bob")} == held._order.keys()
        async with remote(address, layout="f" * 16) as other:
            await other.opened()
            assert await other.tier.probe([key(1)]) == 0
            assert await other.read(1) == []


async def test_what_the_store_changed_is_not_used() -> None:
    """Whatever bit of a record has changed in the store: its header or its length is found here,
    and its bytes have another digest, which the copy to the pool checks.
    """
    rng = random.Random(3)
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(stored, NUMBERS))
        for name in list(held._entries):
            entry = held._entries[name]
            record = bytearray(entry.record)
            record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
            object.__setattr__(entry, "record", bytes(record))
        for number in NUMBERS:
            await tier.opened()
            for block in await tier.tier.read([key(number)]):
                if block.copy.data.tobytes() != contents(number):
                    assert stored(number).copy.digest == block.copy.digest
                    tier.tier.reject(key(number), "the bytes of a block do not have their digest")
        assert tier.tier.counts.errors


async def test_another_block_in_its_place_is_not_used() -> None:
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(stored(1), stored(2))
        one, two = (held._entries[LAYOUT, key(number).identity] for number in (1, 2))
        object.__setattr__(one, "record", two.record)
        assert await tier.read(1) == []
        assert "other tokens" in tier.tier.counts.error
        # It is gone, and is not asked for again.
        await until(lambda: (LAYOUT, key(1).identity) not in held)
        assert await tier.read(2) == [contents(2)]


async def test_a_block_in_doubt_is_forgotten() -> None:
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(stored(1), stored(2))
        tier.tier.forget(key(1))
        assert await tier.tier.probe([key(1)]) == 0
        await until(lambda: len(held) == 1)
        # Once it is computed again, it is stored again.
        await tier.put(stored(1))
        assert await tier.tier.probe([key(1), key(2)]) == 2


async def test_a_block_in_doubt_is_not_read_also_if_the_store_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_link.StoreLink, "forget", lambda *_: None)
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(stored(1), stored(2))
        tier.tier.forget(key(2))
        assert len(held) == 2
        assert await tier.tier.probe([key(1), key(2)]) == 1
        assert await tier.read(1, 2) == [contents(1)]


def in_doubt(number: int) -> StoredBlock:
    """Wrong KV for a block."""
    return StoredBlock(key(number), stored(number + 100_000).copy)


async def test_more_blocks_than_one_call_names_come_into_doubt_at_once() -> None:
    numbers = range(MAX_CALL_BLOCKS + 50)
    async with store(2**26) as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(in_doubt, numbers))
        for number in numbers:
            tier.tier.forget(key(number))
        # A worker that ends in order waits for this.
        assert not tier.tier.is_drained
        await until(lambda: tier.tier.is_drained)
        assert not len(held)
        await tier.put(*map(stored, numbers))
        await all_come_back(tier, numbers)


async def test_a_block_in_doubt_is_not_read_if_the_store_could_not_forget_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget, failures = store_link.store_forget, [TimeoutError(), TimeoutError()]

    async def fail(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await forget(*arguments)

    monkeypatch.setattr(store_link, "store_forget", fail)
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(in_doubt(1))
        tier.tier.forget(key(1))
        tier.tier.offer(stored(1))
        await until(lambda: not failures)
        await tier.opened()
        assert not await tier.tier.probe([key(1)])
        assert await tier.read(1) == []
        await until(lambda: not len(held))
        await tier.put(stored(1))
        await all_come_back(tier, range(1, 2))


async def test_a_block_in_doubt_is_not_read_from_a_store_that_was_skipped_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, status = asyncio.Event(), store_link.store_status

    async def slow(*arguments: Any) -> StoreStatus:
        await answers.wait()
        return await status(*arguments)

    monkeypatch.setattr(store_link, "store_status", slow)
    answers.set()
    async with store() as (first, one), store() as (second, other), remote(first, second) as tier:
        await tier.opened()
        number = next(n for n in NUMBERS if tier.tier._ring.place(key(n).identity) == first)
        await tier.put(in_doubt(number))
        assert len(one) == 1
        answers.clear()
        tier.tier._links[first]._failed("find", TimeoutError())
        tier.tier.forget(key(number))
        await tier.put(stored(number))
        assert len(other) == 1
        assert await tier.read(number) == [contents(number)]
        answers.set()
        await tier.opened()
        assert await tier.read(number) == []
        await until(lambda: not len(one))
        assert await tier.tier.probe([key(number)]) == 0
        await tier.put(stored(number))
        await all_come_back(tier, range(number, number + 1))


async def test_a_store_that_has_to_forget_too_many_blocks_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_link, "_MOST_DOOMED", 4)
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(in_doubt, range(6)))
        tier.tier._links[address]._failed("find", TimeoutError())
        for number in range(6):
            tier.tier.forget(key(number))
        assert "have to be forgotten" in tier.tier.counts.error
        await tier.opened()
        await until(lambda: len(held) == 2)
        await tier.put(*map(stored, NUMBERS))
        for number in NUMBERS:
            assert await tier.tier.probe([key(number)]) == 0
            assert await tier.read(number) == []


@asynccontextmanager
async def held_read(
    tier: Remote, numbers: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[list[bytes]]]:
    """Holds what a store has returned to a read until the context exits."""
    began, goes_on, get = asyncio.Event(), asyncio.Event(), store_link.StoreLink.get

    async def slow(*arguments: Any) -> list[StoredBlock]:
        found = await get(*arguments)
        began.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(store_link.StoreLink, "get", slow)
    reading = asyncio.create_task(tier.read(*numbers))
    await began.wait()
    try:
        yield reading
    finally:
        goes_on.set()


async def test_a_block_that_comes_into_doubt_while_it_is_read_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        await tier.put(in_doubt(1))
        async with held_read(tier, [1], monkeypatch) as reading:
            tier.tier.forget(key(1))
            await tier.put(stored(1))
        assert await reading == []
        assert await tier.read(1) == [contents(1)]


async def test_a_read_keeps_what_comes_before_a_block_that_comes_into_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it comes into doubt a second time, as each block does that is computed again."""
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(stored, range(4)))
        async with held_read(tier, range(4), monkeypatch) as reading:
            tier.tier.forget(key(7))
            await tier.put(stored(7))
            tier.tier.forget(key(2))
        assert await reading == [contents(0), contents(1)]


async def test_another_workers_copy_of_a_block_in_doubt_is_not_read() -> None:
    """The other worker has stored its copy between the doubt and the new computation."""
    async with store() as (address, held), remote(address) as other, remote(address) as tier:
        await other.opened()
        await tier.opened()
        await tier.put(in_doubt(1))
        tier.tier.forget(key(1))
        await until(lambda: not len(held))
        await other.put(in_doubt(1))
        await tier.put(stored(1))
        assert await tier.read(1) == [contents(1)]


async def test_a_block_that_comes_into_doubt_while_it_is_forgotten_is_forgotten_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, goes_on, forget = asyncio.Event(), asyncio.Event(), store_link.store_forget

    async def slow(*arguments: Any) -> None:
        await forget(*arguments)
        began.set()
        await goes_on.wait()

    monkeypatch.setattr(store_link, "store_forget", slow)
    async with store() as (address, _), remote(address) as other, remote(address) as tier:
        await other.opened()
        await tier.opened()
        await tier.put(in_doubt(1))
        tier.tier.forget(key(1))
        await began.wait()
        await other.put(in_doubt(1))
        tier.tier.offer(stored(1))
        goes_on.set()
        await until(lambda: tier.tier.is_drained)
        assert await tier.read(1) == [contents(1)]


async def test_another_workers_copy_is_not_read_either_if_the_own_one_is_lost() -> None:
    async with store() as (address, held), remote(address) as other, remote(address) as tier:
        await other.opened()
        await tier.opened()
        tier.tier.forget(key(1))
        await tier.put(stored(1))
        assert await tier.read(1) == [contents(1)]
        held.forget((LAYOUT, key(1).identity))
        other.tier._links[address]._known.clear()
        await other.put(in_doubt(1))
        assert await tier.read(1) == []
        # It stays in the place of the own copy for some time only.
        tier.tier._refused[key(1).identity].yields_until = 0.0
        tier.tier._links[address]._known.clear()
        await tier.put(stored(1))
        assert await tier.read(1) == [contents(1)]


async def test_two_workers_do_not_replace_each_others_copies_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their copies differ, as of prompts that were computed in other chunks."""
    async with store() as (address, held), remote(address) as one, remote(address) as other:
        workers = ((one, stored(1)), (other, in_doubt(1)))
        for tier, _ in workers:
            await tier.opened()
            tier.tier.forget(key(1))
        await until(lambda: one.tier.is_drained and other.tier.is_drained)

        async def turns(rounds: int) -> int:
            """How many copies the store took."""
            before = held.stored
            for _ in range(rounds):
                for tier, copy in workers:
                    tier.tier._links[address]._known.clear()
                    await tier.put(copy)
                    for _ in range(3):
                        assert await tier.read(1) in ([], [copy.copy.data.tobytes()])
            return held.stored - before

        assert await turns(5) <= 3
        # A block that is not stored is not copied for that either.
        assert one.tier.touch(key(1))
        assert other.tier.touch(key(1))
        monkeypatch.setattr(remote_tier, "_YIELDS_S", 0.0)
        for tier, _ in workers:
            tier.tier._refused[key(1).identity].yields_until = 0.0
        assert await turns(8) >= 5
        held.forget((LAYOUT, key(1).identity))
        one.tier._links[address]._known.clear()
        await one.put(stored(1))
        assert await one.read(1) == [contents(1)]


async def test_the_newest_doubts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "_REFUSED_KEPT", 2)
    monkeypatch.setattr(store_link.StoreLink, "forget", lambda *_: None)
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(in_doubt, range(3)))
        for number in (0, 1, 0, 2):
            tier.tier.forget(key(number))
        assert [await tier.tier.probe([key(number)]) for number in range(3)] == [0, 1, 0]


async def test_a_copy_that_is_offered_while_another_one_is_read_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        tier.tier.forget(key(1))
        await tier.put(stored(1))
        async with held_read(tier, [1], monkeypatch) as reading:
            tier.tier._links[address]._known.clear()
            await tier.put(in_doubt(1))
        assert await reading == []
        assert await tier.read(1) == [in_doubt(1).copy.data.tobytes()]


@pytest.mark.parametrize("first", ["the search", "the doubt"])
async def test_a_block_that_is_forgotten_while_it_is_searched_for_is_stored_again(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, find = asyncio.Event(), asyncio.Event(), store_link.store_find
    forget = store_link.store_forget

    async def slow(*arguments: Any) -> list[bool]:
        found = await find(*arguments)
        began.set()
        await goes_on.wait()
        return found

    async def forgets_later(*arguments: Any) -> None:
        await began.wait()
        await forget(*arguments)

    async with store() as (address, held), remote(address) as other, remote(address) as tier:
        await other.opened()
        await other.put(in_doubt(1))
        await tier.opened()
        monkeypatch.setattr(store_link, "store_find", slow)
        monkeypatch.setattr(store_link, "store_forget", forgets_later)
        if first == "the doubt":
            tier.tier.forget(key(1))
        link = tier.tier._links[address]
        searching = asyncio.create_task(link.find([key(1).identity]))
        await began.wait()
        monkeypatch.setattr(store_link, "store_find", find)
        if first == "the search":
            tier.tier.forget(key(1))
        await until(lambda: tier.tier.is_drained)
        assert not len(held)
        goes_on.set()
        assert await searching == [False]
        await tier.put(stored(1))
        assert len(held) == 1
        assert await tier.read(1) == [contents(1)]


async def test_a_full_store_gives_up_old_blocks_and_takes_new_ones() -> None:
    room = 10
    frame = BLOCK_BYTES + 128 + 32
    async with store(room * (frame + ENTRY_BYTES)) as (address, held), remote(address) as tier:
        await tier.opened()
        for number in NUMBERS:
            await tier.put(stored(number))
        assert len(held) <= room
        assert held.evicted >= len(NUMBERS) - room
        last = range(NUMBERS.stop - 5, NUMBERS.stop)
        await all_come_back(tier, last)
        assert not tier.tier.counts.errors


async def test_what_is_too_much_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "STAGING_BYTES", 4 * BLOCK_BYTES)
    async with store() as (address, held), remote(address) as tier:
        await tier.opened()
        for number in NUMBERS:
            tier.tier.offer(stored(number))
        assert tier.tier.counts.dropped == len(NUMBERS) - 4
        assert not tier.tier.has_room
        await tier.tier.wait_for_room()
        await until(lambda: tier.tier.is_drained)
        assert len(held) == 4


@pytest.mark.long
async def test_a_killed_store_loses_its_blocks_only() -> None:
    killed, kept = StoreProcess(), StoreProcess()
    again = None
    try:
        async with remote(killed.address, kept.address) as tier:
            await tier.opened()
            await tier.put(*map(stored, NUMBERS))
            kept_blocks = [n for n in NUMBERS if await at(tier, n) == kept.address]
            assert 0 < len(kept_blocks) < len(NUMBERS)
            killed.kill()
            with capture_logs() as logs:
                await until_skipped(tier)
            assert [one["store"] for one in logs if one["event"] == "kv_store_skipped"]
            assert killed.address in tier.tier.counts.error
            assert await tier.read(*kept_blocks) == [contents(n) for n in kept_blocks]
            # Its blocks go to the other one.
            await tier.put(*map(stored, NUMBERS))
            await all_come_back(tier)
            # It comes back empty, and gets its blocks again.
            again = StoreProcess(port=int(killed.address.rpartition(":")[2]))
            await tier.opened()
            lost = next(n for n in NUMBERS if n not in kept_blocks)
            assert await tier.tier.probe([key(lost)]) == 0
            await tier.put(*map(stored, NUMBERS))
            await all_come_back(tier)
    finally:
        for one in (killed, kept, again):
            if one is not None:
                one.close()


async def at(tier: Remote, number: int) -> str:
    """Where a block is placed now."""
    link = tier.tier._link(key(number))
    assert link is not None
    return link.address


async def until_skipped(tier: Remote) -> None:
    """Asks until the loss of a store is noticed."""
    async with asyncio.timeout(60):
        while not tier.tier.counts.skipped:
            await tier.tier.probe([key(number) for number in NUMBERS])
            await asyncio.sleep(0.01)


@asynccontextmanager
async def behind_a_proxy() -> AsyncIterator[tuple[TcpProxy, Remote]]:
    async with (
        store() as (address, _),
        proxy_to(address) as proxy,
        remote(proxy.address) as tier,
    ):
        await tier.opened()
        await tier.put(*map(stored, NUMBERS))
        yield proxy, tier


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_silent_store_is_skipped_until_it_answers(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_a_proxy() as (proxy, tier):
        monkeypatch.setattr(store_link, "_FIND_S", 0.2)
        monkeypatch.setattr(store_link, "_STATUS_S", 0.2)
        proxy.passes[direction].clear()
        assert await tier.tier.probe([key(99)]) == 0
        assert tier.tier.counts.skipped == 1
        assert not tier.tier.works
        # From now on nobody waits for it.
        monkeypatch.setattr(store_link, "_FIND_S", 30.0)
        assert await tier.tier.probe([key(0)]) == 0
        assert await tier.read(0) == []
        dropped = tier.tier.counts.dropped
        tier.tier.offer(stored(99))
        assert tier.tier.counts.dropped == dropped + 1
        monkeypatch.setattr(store_link, "_STATUS_S", 30.0)
        proxy.heal()
        await tier.opened()
        await all_come_back(tier)


async def test_a_store_that_stops_within_a_read_gives_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind_a_proxy() as (proxy, tier):
        monkeypatch.setattr(store_link, "_SILENCE_S", 0.2)
        monkeypatch.setattr(store_link, "_STATUS_S", 0.2)
        proxy.part()
        assert await tier.read(*NUMBERS) == []
        assert "no answer in time" in tier.tier.counts.error
        proxy.heal()
        monkeypatch.setattr(store_link, "_STATUS_S", 30.0)
        monkeypatch.setattr(store_link, "_SILENCE_S", 30.0)
        await tier.opened()
        await all_come_back(tier)


async def test_a_store_is_skipped_that_is_silent_for_as_long_as_a_prompt_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with behind_a_proxy() as (proxy, tier):
        monkeypatch.setattr(store_link, "_FIND_S", 0.1)
        proxy.part()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await tier.read(*NUMBERS)
        assert not tier.tier.works
        assert "no answer in time" in tier.tier.counts.error
        # A read that its request's end cancels says nothing about the store.
        monkeypatch.setattr(store_link, "_FIND_S", 30.0)
        proxy.heal()
        await tier.opened()
        proxy.part()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await tier.read(*NUMBERS)
        assert tier.tier.works


async def test_a_connection_that_breaks_is_made_again() -> None:
    async with behind_a_proxy() as (proxy, tier):
        for _ in range(3):
            proxy.reset()
            reading = tier.tier.read([key(number) for number in NUMBERS])
            for number, block in enumerate(await reading):
                assert block.copy.data.tobytes() == contents(number)
            async with asyncio.timeout(60):
                while await tier.tier.probe([key(number) for number in NUMBERS]) != len(NUMBERS):
                    await asyncio.sleep(0.01)


async def test_a_store_of_another_version_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Protocol(9, 9, (), "9.0")
    monkeypatch.setattr("kvrelay.kv_store.service.ours", lambda: newer)
    async with store() as (address, held), remote(address) as tier:
        await until(lambda: tier.tier.counts.errors > 1)
        assert "upgrade" in tier.tier.counts.error
        assert tier.tier.counts.skipped == 1
        tier.tier.offer(stored(1))
        assert not len(held)


async def test_a_server_that_is_no_store_is_skipped() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        async with remote(f"{host}:{port}") as tier:
            await until(lambda: tier.tier.counts.errors > 1)
            assert tier.tier.counts.skipped == 1
            assert await tier.tier.probe([key(1)]) == 0
    finally:
        server.close()
        await server.wait_closed()


class Garbled(grpc.GenericRpcHandler):
    """While it is on, answers one method with bytes that are no message."""

    def __init__(self, method: str) -> None:
        self.on = False
        self._method = method

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not self.on or details.method.rpartition("/")[2] != self._method:
            return None

        async def whole(_request: object, _context: object) -> bytes:
            return b"\xff" * 10

        async def parts(_request: object, _context: object) -> AsyncIterator[bytes]:
            yield b"\xff" * 10

        if self._method == "Get":
            return grpc.unary_stream_rpc_method_handler(parts)
        if self._method == "Put":
            return grpc.stream_unary_rpc_method_handler(whole)
        return grpc.unary_unary_rpc_method_handler(whole)


@pytest.mark.parametrize("method", ["Find", "Put", "Get", "Forget", "GetStoreStatus"])
async def test_an_answer_that_cannot_be_read_is_about_its_store_only(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(store_link, "_STATUS_EVERY_S", 0.05)
    garbled, register = Garbled(method), process.add_kv_store_servicer

    def registered(*arguments: Any) -> None:
        arguments[-1].add_generic_rpc_handlers((garbled,))
        register(*arguments)

    async with store() as (good, held):
        monkeypatch.setattr(process, "add_kv_store_servicer", registered)
        async with store() as (bad, _), remote(good, bad) as tier:
            await tier.opened()
            await tier.put(*map(stored, NUMBERS))
            garbled.on = True
            near = [n for n in NUMBERS if (LAYOUT, key(n).identity) in held]
            for number in range(1000, 2000):
                if tier.tier.counts.errors:
                    break
                tier.tier.offer(stored(number))
                tier.tier.forget(key(number + 1000))
                await tier.read(*NUMBERS)
                for one in near:
                    assert await tier.tier.probe([key(one)]) == 1
                await tier.tier.probe([key(n) for n in NUMBERS if n not in near])
                await asyncio.sleep(0.01)
            assert bad in tier.tier.counts.error
            assert "Error(" not in tier.tier.counts.error
            assert [(await tier.read(one)) for one in near] == [[contents(one)] for one in near]
            garbled.on = False
            await tier.opened()


async def test_a_store_that_answers_all_but_reads_is_skipped_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbled, register = Garbled("Get"), process.add_kv_store_servicer

    def registered(*arguments: Any) -> None:
        arguments[-1].add_generic_rpc_handlers((garbled,))
        register(*arguments)

    monkeypatch.setattr(process, "add_kv_store_servicer", registered)
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        await tier.put(*map(stored, NUMBERS))
        link = tier.tier._links[address]
        garbled.on = True
        async with asyncio.timeout(60):
            while link._pause < store_link._LONGEST_PAUSE_S:
                await tier.opened()
                # An answer to a search does not prove that reads work.
                await tier.tier.probe([key(99)])
                await tier.read(0)
        garbled.on = False
        await tier.opened()
        await tier.read(0)
        assert link._pause == store_link._PAUSE_S


async def test_a_put_that_is_cut_leaves_whole_blocks() -> None:
    large = 2**20
    blocks = [stored(number, block_bytes=large) for number in range(12)]
    async with store(2**26) as (address, held), proxy_to(address) as proxy:
        async with remote(proxy.address, block_bytes=large) as tier:
            await tier.opened()
            proxy.limit = 3 * large
            for block in blocks:
                tier.tier.offer(block)
            await until(lambda: proxy.limit == 0 or proxy.held_back)
            proxy.reset()
            await until(lambda: tier.tier.counts.errors)
        assert len(held) < len(blocks)
        async with remote(address, block_bytes=large) as tier:
            await tier.opened()
            for block in blocks:
                for found in await tier.tier.read([block.key]):
                    assert found.copy.data.tobytes() == block.copy.data.tobytes()


async def test_what_waits_is_read_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        block = stored(1)
        tier.tier.offer(block)
        assert tier.tier.holds(block.key)
        (found,) = await tier.tier.read([block.key])
        assert isinstance(found, StoredBlock)
        assert found.copy is block.copy


async def test_a_put_whose_connection_is_closed_does_not_end_the_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC then cancels the call, as if the worker ended."""
    began, put = asyncio.Event(), store_link.store_put

    async def slow(*arguments: Any) -> int:
        if not began.is_set():
            began.set()
            raise asyncio.CancelledError
        return await put(*arguments)

    monkeypatch.setattr(store_link, "store_put", slow)
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        tier.tier.offer(stored(0))
        await began.wait()
        await until(lambda: tier.tier.counts.errors)
        await tier.opened()
        await tier.put(*map(stored, NUMBERS))
        await all_come_back(tier)


async def test_a_block_that_comes_into_doubt_while_it_is_put_is_put_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, goes_on, put = asyncio.Event(), asyncio.Event(), store_link.store_put

    async def slow(*arguments: Any) -> int:
        began.set()
        await goes_on.wait()
        return await put(*arguments)

    monkeypatch.setattr(store_link, "store_put", slow)
    wrong = StoredBlock(key(1), stored(2).copy)
    async with store() as (address, _), remote(address) as tier:
        await tier.opened()
        tier.tier.offer(wrong)
        await began.wait()
        tier.tier.forget(key(1))
        tier.tier.offer(stored(1))
        goes_on.set()
        await until(lambda: tier.tier.counts.stored == 2)
        async with remote(address) as other:
            await other.opened()
            assert await other.tier.probe([key(1)]) == 1
            assert await other.read(1) == [contents(1)]
