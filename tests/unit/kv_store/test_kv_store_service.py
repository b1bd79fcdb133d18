"""What a store takes and refuses: whole blocks of the announced identity only, from peers of its
version, within its bounds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from support.certificates import Certificates
from support.stores import LAYOUT, TENANT, StoreProcess, alive, payload, remote, store, stored

from kvrelay.config.security import SecurityConfig
from kvrelay.errors import ConfigError, DeadlineExceeded
from kvrelay.kv_store import service
from kvrelay.kv_store.block_store import BlockStore
from kvrelay.protocol_version import Protocol
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.wire.kv_frame import KvBlocks, KvCommit, KvOpen
from kvrelay.wire.store import (
    FRAME_BYTES,
    MAX_CALL_BLOCKS,
    SERVICE_NAME,
    StoreBlocks,
    records_of,
    store_find,
    store_get,
    store_put,
    store_status,
)
from kvrelay.wire.transfer import frame_to_bytes
from kvrelay.worker.tiers.block_file import BlockHeader
from kvrelay.worker.tiers.tier import StoredBlock

NEWER = Protocol(9, 9, (), "9.0")


def opening(*blocks: StoredBlock, **changes: object) -> bytes:
    values: dict[str, object] = {
        "layout_hash": LAYOUT,
        "identities": b"".join(block.key.identity for block in blocks),
        "tenant": TENANT,
    } | changes
    opened = KvOpen("", 0, 0, 0, 0, transport="grpc", **values)  # type: ignore[arg-type]
    return frame_to_bytes(opened)


def frame(*pieces: bytes, **changes: int) -> bytes:
    values = {"sequence": 0, "first": 0, "count": 1, "first_layer": 0, "num_layers": 0} | changes
    size = sum(map(len, pieces))
    return frame_to_bytes(KvBlocks(**values, num_bytes=size, payload=pieces))


async def each(frames: Sequence[bytes]) -> AsyncIterator[bytes]:
    for one in frames:
        yield one


async def put(address: str, *frames: bytes) -> str:
    """The status of a Put, and its details."""
    async with worker_channel(address, None) as channel:
        try:
            await store_put(channel, each(frames), 30.0)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_what_was_put_comes_back_up_to_the_first_missing_block() -> None:
    blocks = [stored(number) for number in range(4)]
    async with store() as (address, held), worker_channel(address, None) as channel:
        sent = [frame(*payload(block)) for block in blocks]
        said = await put(address, opening(*blocks[:2], blocks[3]), *sent[:2], sent[3])
        assert said == "OK"
        named = StoreBlocks(LAYOUT, tuple(block.key.identity for block in blocks))
        assert await store_find(channel, named, 30.0) == (True, True, False, True)
        (got,) = [one async for one in store_get(channel, named, 30.0)]
        assert records_of(got) == b"".join(b"".join(payload(block)) for block in blocks[:2])
        other = StoreBlocks("f" * 16, named.identities)
        assert await store_find(channel, other, 30.0) == (False,) * 4
        status = await store_status(channel, 30.0)
        assert (status.blocks, status.stored, status.found, status.tenants) == (3, 3, 2, 1)
        assert status.used_bytes == held.used_bytes


async def test_blocks_of_any_size_may_be_cut_into_frames_in_any_way() -> None:
    rng = random.Random(11)
    async with store(2**26) as (address, held), worker_channel(address, None) as channel:
        for size in (1, 100, 4096, 400_000, 2**20 + 1):
            blocks = [stored(number, block_bytes=size) for number in range(12)]
            records = [payload(block) for block in blocks]
            frames = [frame(part) for part in parts(rng, records)]
            assert await put(address, opening(*blocks), *frames) == "OK"
            named = StoreBlocks(LAYOUT, tuple(block.key.identity for block in blocks))
            got = [one async for one in store_get(channel, named, 30.0)]
            assert b"".join(map(records_of, got)) == b"".join(b"".join(one) for one in records)
            assert all(len(one) < FRAME_BYTES + 64 for one in got)
            for block in blocks:
                held.forget((LAYOUT, block.key.identity))


def parts(rng: random.Random, records: Sequence[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Cuts records anywhere but in their headers, into frames of up to FRAME_BYTES."""
    sent = b""
    for header, data in records:
        while len(sent) + len(header) > FRAME_BYTES:
            yield sent
            sent = b""
        sent += header
        while data:
            cut = min(rng.choice([1, 3000, 2**19, len(data)]), FRAME_BYTES - len(sent))
            sent, data = sent + data[:cut], data[cut:]
            if len(sent) == FRAME_BYTES or rng.random() < 0.3:
                yield sent
                sent = b""
    if sent:
        yield sent


async def test_a_large_block_takes_no_memory_before_it_is_allowed() -> None:
    """Its header says how long it is."""
    block = stored(1)
    async with store(2**21) as (address, held):
        header = BlockHeader(LAYOUT, block.key.identity, 2**40, 0).pack()
        said = await put(address, opening(block), frame(header))
        assert said.startswith("RESOURCE_EXHAUSTED: a block takes 1099511627904 bytes"), said
        assert not len(held)


async def test_a_message_is_as_long_as_a_frame_at_most() -> None:
    async with store(2**30) as (address, _), worker_channel(address, None) as channel:
        named = StoreBlocks(LAYOUT, (b"x" * 32,) * (FRAME_BYTES // 16))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await store_find(channel, named, 30.0)


async def test_large_blocks_arrive_one_at_a_time() -> None:
    held = BlockStore(2**26)
    store = service.KvStoreService(held)
    blocks = [stored(number, block_bytes=3 * 2**20) for number in range(2)]
    read = [0, 0]
    go_on = asyncio.Event()

    async def frames(number: int) -> AsyncIterator[bytes]:
        yield opening(blocks[number])
        for part in parts(random.Random(number), [payload(blocks[number])]):
            read[number] += 1
            yield frame(part)
            if number == 0:
                await go_on.wait()

    async def put_some(number: int) -> int:
        return (await store._put(frames(number))).blocks

    puts = [asyncio.create_task(put_some(number)) for number in range(2)]
    async with asyncio.timeout(60):
        while read != [1, 1]:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert read == [1, 1], "the second waits for the first, which waits for its peer"
        small = stored(3)
        await store._put(each([opening(small), frame(*payload(small))]))
        go_on.set()
        assert await asyncio.gather(*puts) == [1, 1]
    assert len(held) == 3


async def test_a_block_that_is_not_the_announced_one_is_refused() -> None:
    block, other = stored(1), stored(2)
    header, data = payload(block)
    cases = {
        "other tokens": frame(*payload(block, identity=other.key.identity)),
        "layout": frame(*payload(block, layout="f" * 16)),
        "ended before": frame(header, data[:-1]),
        "not a KV block": frame(b"x" * 128, data),
        "header is damaged": frame(bytes([*header[:40], header[40] ^ 1, *header[41:]]), data),
        "do not have their digest": frame(header, bytes([data[0] ^ 1]) + data[1:]),
        "the header has": frame(b"x"),
        "holds no blocks": frame(),
        "frame holds no": frame_to_bytes(KvCommit(1, 2, 3, 4)),
        "more blocks than": frame(header, data, *payload(other)),
        "not a hand-off frame": b"\xff" * 40,
    }
    async with store() as (address, held):
        for words, sent in cases.items():
            assert words in (said := await put(address, opening(block), sent)), said
            assert said.partition(":")[0] in (
                "INVALID_ARGUMENT",
                "DATA_LOSS",
                "FAILED_PRECONDITION",
            )
        # The announced block of the frame with more was whole.
        held.forget((LAYOUT, block.key.identity))
        assert not len(held)
        assert await put(address, opening(block), frame(header, data)) == "OK"


async def test_a_put_that_does_not_open_is_refused() -> None:
    block = stored(1)
    sent = frame(*payload(block))
    cases = {
        "begins with an open frame": sent,
        "layout_hash is": opening(block, layout_hash="../../etc"),
        "tenant is": opening(block, tenant="a tenant"),
        "identities has 33 bytes": opening(block, identities=b"x" * 33),
        "identities has 0 bytes": opening(block, identities=b""),
        "it speaks protocol 9": opening(block, protocol=NEWER),
        "upgrade": opening(block, protocol=NEWER),
        "too long": opening(block, tenant="x" * 2**17),
    }
    async with store() as (address, held):
        for words, first in cases.items():
            assert words in (said := await put(address, first, sent)), said
        assert "ended before" in await put(address)
        assert "ended before" in await put(address, opening(block))
        assert not len(held)


async def test_names_that_are_none_are_refused() -> None:
    named = (b"x" * 32,)
    cases = [
        StoreBlocks("nothing", named),
        StoreBlocks(LAYOUT, (b"x",)),
        StoreBlocks(LAYOUT, ()),
        StoreBlocks(LAYOUT, named * (MAX_CALL_BLOCKS + 1)),
        StoreBlocks(LAYOUT, named, NEWER),
    ]
    async with store() as (address, _), worker_channel(address, None) as channel:
        for case in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await store_find(channel, case, 30.0)
            assert caught.value.code().name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(store_get(channel, case, 30.0))


async def test_a_block_that_no_tenant_may_have_is_refused() -> None:
    block = stored(1)
    async with store(2**21, tenant_bytes=2048) as (address, held):
        said = await put(address, opening(block), frame(*payload(block)))
        assert said.startswith("RESOURCE_EXHAUSTED: a block takes"), said
        assert not len(held)


async def test_a_connection_has_a_limited_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_CALLS", 2)
    stalls = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield opening(stored(1))
        await stalls.wait()

    async with store() as (address, _), worker_channel(address, None) as channel:
        named = StoreBlocks(LAYOUT, (b"x" * 32,))
        # Connects, and the connection stays.
        await store_find(channel, named, 30.0)
        puts = [asyncio.create_task(store_put(channel, stalled(), 60.0)) for _ in range(2)]

        async def ask_until_refused() -> None:
            async with asyncio.timeout(60):
                while True:
                    await store_find(channel, named, 30.0)
                    await asyncio.sleep(0.01)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_until_refused()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Other connections have calls of their own.
        async with worker_channel(address, None, [("grpc.use_local_subchannel_pool", 1)]) as other:
            await store_find(other, named, 30.0)
        for one in puts:
            one.cancel()
        await asyncio.gather(*puts, return_exceptions=True)


async def test_silent_puts_of_one_connection_hold_up_no_other() -> None:
    block = stored(1)

    async def stalled() -> AsyncIterator[bytes]:
        yield opening(stored(2))
        await asyncio.Event().wait()

    async with store() as (address, _), worker_channel(address, None) as channel:
        puts = [asyncio.create_task(store_put(channel, stalled(), 60.0)) for _ in range(24)]
        # All but its share are refused.
        refused, _ = await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(grpc.aio.AioRpcError, match="2 puts in progress"):
            refused.pop().result()
        own = ("grpc.use_local_subchannel_pool", 1)
        async with worker_channel(address, None, [own]) as other:
            await store_put(other, each([opening(block), frame(*payload(block))]), 60.0)
        for one in puts:
            one.cancel()
        await asyncio.gather(*puts, return_exceptions=True)


async def test_a_put_that_stalls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WAIT_S", 0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield opening(stored(1))
        await asyncio.Event().wait()

    async with store() as (address, _), worker_channel(address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store_put(channel, stalled(), 60.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_read_whose_worker_does_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep blocks in memory that the store has given up."""
    monkeypatch.setattr(service, "WAIT_S", 0.05)
    block, held = stored(1, block_bytes=2**23), BlockStore(2**26)
    held.put((LAYOUT, block.key.identity), TENANT, b"".join(payload(block)))
    written = 0

    async def write(frame: bytes) -> None:
        nonlocal written
        written += 1
        if written == 3:
            await asyncio.Event().wait()

    async with asyncio.timeout(60):
        await service.KvStoreService(held)._get(StoreBlocks(LAYOUT, (block.key.identity,)), write)
    assert written == 3


async def test_silent_puts_of_large_blocks_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HURRY_S", 0.05)
    monkeypatch.setattr(service, "WAIT_S", 60.0)
    store = service.KvStoreService(BlockStore(2**26))
    block = stored(1, block_bytes=2**22)

    async def silent() -> AsyncIterator[bytes]:
        yield opening(block)
        yield frame(next(parts(random.Random(1), [payload(block)])))
        await asyncio.Event().wait()

    puts = [store._put(silent()) for _ in range(service.MAX_PUTS)]
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*puts, return_exceptions=True)
    assert {type(one) for one in errors} == {DeadlineExceeded}


async def test_random_bytes_end_their_call_only() -> None:
    rng, block = random.Random(5), stored(1)
    good = [opening(block), frame(*payload(block))]
    async with store() as (address, held):
        for _ in range(60):
            sent = [bytearray(one) for one in good]
            for _ in range(rng.randrange(1, 4)):
                spoiled = rng.choice(sent)
                spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
            await put(address, *map(bytes, sent))
            assert not held.check_integrity()
            for key in [(layout, one) for layout, one in held._entries]:
                held.forget(key)
        assert await put(address, *good) == "OK"


async def test_only_workers_reach_a_store_with_tls(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    for role in ("worker", "router", "client"):
        made.issue(role)  # type: ignore[arg-type]
    pairs = {
        name: {"cert": str(tmp_path / f"{name}.pem"), "key": str(tmp_path / f"{name}-key.pem")}
        for name in ("worker", "router", "client")
    }
    security = SecurityConfig.model_validate(
        {"tls": {"ca": str(tmp_path / "ca.pem"), **{n: pairs[n] for n in ("worker", "router")}}}
    )
    other = SecurityConfig.model_validate(
        {
            "tls": {
                "ca": str(tmp_path / "ca.pem"),
                "router": pairs["router"],
                "worker": pairs["worker"],
            }
        }
    )
    named = StoreBlocks(LAYOUT, (b"x" * 32,))
    async with store(security=security) as (address, _):
        worker = Credentials.internal(other, "worker")
        async with worker_channel(address, worker) as channel:
            assert await store_find(channel, named, 30.0) == (False,)
        for credentials, code in (
            (None, "UNAVAILABLE"),
            (Credentials.internal(other, "router"), "PERMISSION_DENIED"),
        ):
            async with worker_channel(address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await store_find(channel, named, 30.0)
                assert caught.value.code().name == code
                # The role is checked before a message is read, so nobody else fills the memory.
                long = StoreBlocks(LAYOUT, named.identities * 2**16)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await store_find(channel, long, 30.0)
                assert caught.value.code().name == code
        async with remote(address, credentials=worker) as tier:
            await (await tier.opened()).put(stored(1))
            assert len(await tier.read(1)) == 1


async def test_a_store_that_others_could_reach_needs_tls() -> None:
    with pytest.raises(ConfigError, match=r"not a loopback address and needs security\.tls"):
        async with store(listen="0.0.0.0:0"):
            pass


async def test_an_address_in_use_is_an_error() -> None:
    async with store() as (address, _):
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with store(listen=address):
                pass


def test_the_service_is_that_of_the_proto() -> None:
    assert SERVICE_NAME == "kvrelay.v1.KvStoreService"


def test_sigterm_ends_the_process() -> None:
    process = StoreProcess("--size", "8MiB")
    assert alive(process.pid)
    try:
        assert process.terminate() == 0
    finally:
        process.close()
