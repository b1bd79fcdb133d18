"""From sender to receiver over real connections: what arrives, and what both say of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from support.transfer_ends import KEY, LAYOUT, DecodeEnd, MemoryFile, decode_end, sender_of

from kv_transfer.blocks.plan import Layers
from kv_transfer.sender import Sender
from kvrelay.errors import DataLoss, FailedPrecondition
from kvrelay.types.kv_layout import KvLayout, LayerKv

TRANSPORTS = ["memory", "shm", "grpc", "gloo"]


def random_layout(rng: random.Random) -> KvLayout:
    layers = tuple(
        LayerKv(
            rng.randint(1, 3),
            8 * rng.randint(2, 4),
            8 * rng.randint(1, 2),
            v_in_k=rng.random() < 0.3,
        )
        for _ in range(rng.randint(1, 5))
    )
    return KvLayout(
        layers,
        block_size=rng.choice([1, 4, 16]),
        dtype=rng.choice(["float32", "bfloat16", "int8", "int4"]),
    )


def arrived(decode: DecodeEnd, numbers: list[int]) -> list[bytes]:
    return [decode.arena.block(number) for number in numbers]


async def hand_over(
    sender: Sender, decode: DecodeEnd, key: tuple[str, int], transport: str, shift: int
) -> None:
    """20 blocks to the lease's, both fragmented, in runs of three."""
    sources = [(n * 3 + shift) % 32 for n in range(10)]
    targets = [n * 2 + shift for n in range(10)]
    push = sender.open(key, decode.grant(targets, key=key, transport=transport))
    for first in range(0, 10, 3):
        push.send(first, sources[first : first + 3])
        await asyncio.sleep(0)
    await push.commit(1, 10 * LAYOUT.block_size, 0.0)
    source = sender.arena
    assert isinstance(source, MemoryFile)
    assert arrived(decode, targets) == [source.block(n) for n in sources]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(4))
async def test_kv_arrives_byte_for_byte(transport: str, seed: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    source = MemoryFile(layout, rng.randint(10, 30), seed=seed)
    async with (
        decode_end(layout, num_blocks=rng.randint(10, 30)) as decode,
        sender_of(source) as sender,
    ):
        count = rng.randint(1, 10)
        sources = rng.sample(range(source.num_blocks), count)
        targets = rng.sample(range(decode.arena.num_blocks), count)
        untouched = [n for n in range(decode.arena.num_blocks) if n not in targets]
        before = arrived(decode, untouched)
        target = decode.grant(targets, transport=transport)
        push = sender.open(KEY, target)
        cut = rng.randint(0, count)
        push.send(0, sources[:cut])
        push.send(cut, sources[cut:])
        handoff = await push.commit(
            42, count * layout.block_size - rng.randint(0, layout.block_size - 1), 5.0
        )
        assert arrived(decode, targets) == [source.block(n) for n in sources]
        assert arrived(decode, untouched) == before
        assert (handoff.transport, handoff.why) == (transport, "asked for")
        assert (handoff.blocks, handoff.block_bytes) == (count, layout.block_bytes)
        assert handoff.bytes == push.bytes_packed == count * layout.block_bytes
        (lease, token, _), *rest = decode.committed
        assert (lease.lease_id, token, rest) == (target.lease_id, 42, [])
        assert len(decode.leases) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_blocks_that_the_target_has_are_not_sent(transport: str) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        cached = arrived(decode, [9, 3])
        push = sender.open(KEY, decode.grant([9, 3, 4, 20], cached_blocks=2, transport=transport))
        push.send(2, [7])
        push.send(3, [6])
        handoff = await push.commit(42, 4 * LAYOUT.block_size, 5.0)
        assert (handoff.blocks, handoff.cached_blocks, handoff.bytes) == (
            2,
            2,
            2 * LAYOUT.block_bytes,
        )
        assert arrived(decode, [9, 3, 4, 20]) == [*cached, source.block(7), source.block(6)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_push_with_nothing_to_send_commits(transport: str) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([9, 3], cached_blocks=2, transport=transport))
        handoff = await push.commit(42, 2 * LAYOUT.block_size, 5.0)
        assert (handoff.blocks, handoff.bytes, len(decode.committed)) == (0, 0, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_two_pushes_at_once_do_not_mix(transport: str) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        await asyncio.gather(
            *(hand_over(sender, decode, (f"r{n}", 0), transport, n) for n in range(2))
        )
        assert {lease.key for lease, _, _ in decode.committed} == {("r0", 0), ("r1", 0)}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_pair_of_workers_hands_over_again_and_again(transport: str) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        for n in range(4):
            await hand_over(sender, decode, (f"r{n}", 0), transport, n)
        assert len(decode.committed) == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_without_digests_kv_arrives_all_the_same(transport: str) -> None:
    async with (
        decode_end(digests=False) as decode,
        sender_of(MemoryFile(), digests=False) as sender,
    ):
        await hand_over(sender, decode, KEY, transport, 0)


async def test_large_pushes_travel_in_bounded_frames() -> None:
    # 196,608 bytes a block
    layout = KvLayout((LayerKv(8, 64, 32),) * 4, block_size=16, dtype="float32")
    source = MemoryFile(layout, 40)
    async with decode_end(layout, 40) as decode, sender_of(source) as sender:
        push = sender.open(KEY, decode.grant(list(range(40))))
        push.send(0, list(reversed(range(40))))
        await push.commit(1, 40 * 16, 0.0)
        assert arrived(decode, [0, 39]) == [source.block(39), source.block(0)]


async def test_a_block_larger_than_a_frame_goes_alone() -> None:
    layout = KvLayout((LayerKv(8, 256, 256),), block_size=256, dtype="float32")  # 4 MiB a block
    source = MemoryFile(layout, 3)
    async with decode_end(layout, 3) as decode, sender_of(source) as sender:
        push = sender.open(KEY, decode.grant([1, 0]))
        push.send(0, [2, 1])
        await push.commit(1, 512, 0.0)
        assert arrived(decode, [1, 0]) == [source.block(2), source.block(1)]


async def test_auto_takes_memory_between_workers_of_one_process() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1], transport="auto"))
        push.send(0, [1])
        handoff = await push.commit(1, 4, 0.0)
        assert (handoff.transport, handoff.why) == ("memory", "same process")


async def test_auto_falls_back_to_grpc_and_says_why() -> None:
    source = MemoryFile()
    source.nonce += 1  # so the receiver finds another segment than the one announced
    async with decode_end() as decode, sender_of(source) as sender:
        target = decode.grant([1, 2], transport="auto", worker_id="in another process")
        push = sender.open(KEY, target)
        assert push.transport == "shm"
        push.send(0, [5, 4])
        handoff = await push.commit(1, 8, 0.0)
        assert handoff.transport == "grpc"
        assert handoff.why.startswith("shm failed: ")
        assert "does not contain arena" in handoff.why
        assert arrived(decode, [1, 2]) == [source.block(5), source.block(4)]


async def test_times_are_of_the_senders_clock() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2]))
        push.send(0, [5])
        sender.clock.advance(2.0)  # type: ignore[attr-defined]
        push.send(1, [6])
        sender.clock.advance(1.0)  # type: ignore[attr-defined]
        handoff = await push.commit(1, 8, prefill_done_at=7.5)
        assert (handoff.seconds, handoff.exposed_seconds) == (3.0, 0.5)


async def test_another_model_is_refused() -> None:
    other = KvLayout((LayerKv(2, 8, 8),) * 3, block_size=4, dtype="float32")
    async with (
        decode_end() as decode,
        sender_of(MemoryFile(other), layout_hash="another") as sender,
    ):
        push = sender.open(KEY, decode.grant([1]))
        with pytest.raises(
            FailedPrecondition, match="has 3 layers, or KV heads or head dimensions, that differ"
        ):
            await push.commit(1, 4, 0.0)


@pytest.mark.parametrize(
    "changes", [{"block_size": 0}, {"block_size": 2**30}, {"dtype": "complex"}, {"word": 3}]
)
async def test_a_layout_of_no_known_kind_is_refused(changes: dict[str, Any]) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source, layout_hash="another") as sender:
        source.layout = replace(source.layout, **changes)
        push = sender.open(KEY, decode.grant([1]))
        with pytest.raises(FailedPrecondition, match="are not supported"):
            await push.commit(1, 4, 0.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_by_groups_of_layers(transport: str) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        push = sender.open(KEY, decode.grant([9, 3, 4], transport=transport))
        push.send(0, [1, 2], Layers(0, 1))
        push.send(0, [1, 2], Layers(1, 1))
        push.send(2, [7], Layers(0, 1))
        push.send(2, [7], Layers(1, 1))
        handoff = await push.commit(1, 12, 0.0)
        assert handoff.bytes == 3 * LAYOUT.block_bytes
        assert arrived(decode, [9, 3, 4]) == [source.block(n) for n in (1, 2, 7)]


async def test_a_layer_that_did_not_come_is_missed() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([9, 3]))
        push.send(0, [1, 2], Layers(0, 1))
        push.send(1, [2], Layers(1, 1))
        with pytest.raises(DataLoss, match="1 of 2 blocks are missing"):
            await push.commit(1, 8, 0.0)
