from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.transfer_ends import LAYOUT, MemoryFile

from kv_transfer.block_writer import BlockWriter
from kv_transfer.blocks.arena import places_in
from kv_transfer.blocks.digest import MULTILINEAR, multilinear_digests
from kv_transfer.blocks.plan import Layers, Places
from kv_transfer.lease import Lease
from kv_transfer.transports import Source
from kvrelay.errors import DataLoss, Unimplemented
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import KvBlocks

# Regions that are no whole words
ODD = KvLayout((LayerKv(1, 3, 7), LayerKv(3, 5, 1)), block_size=1, dtype="int8")
ALL = Layers(0, 2)


def splitmix64(count: int) -> list[int]:
    state, outputs = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ z >> 31)
    return outputs


def naive(arena: MemoryFile, block: int, sizes: tuple[int, ...]) -> int:
    words, data = [], arena.block(block)
    for size in sizes:
        region, data = data[:size], data[size:]
        padded = region + bytes(-size % 4)
        words += [
            int.from_bytes(padded[at : at + 4], "little", signed=True)
            for at in range(0, len(padded), 4)
        ]
    return (
        sum(word * (factor | 1) for word, factor in zip(words, splitmix64(len(words)), strict=True))
        % 2**64
    )


@pytest.mark.parametrize("layout", [LAYOUT, ODD])
def test_it_is_the_sum_that_it_says(layout: KvLayout) -> None:
    arena = MemoryFile(layout, 5, seed=3)
    places = places_in(arena)
    found = multilinear_digests(arena.buffer, places, [4, 0, 2])
    assert found == tuple(naive(arena, block, places.sizes) for block in (4, 0, 2))


@pytest.mark.parametrize("layout", [LAYOUT, ODD])
def test_it_does_not_depend_on_where_the_blocks_lie(layout: KvLayout) -> None:
    arena = MemoryFile(layout, 5, seed=3)
    payload = torch.cat(
        [torch.frombuffer(bytearray(arena.block(3)), dtype=torch.uint8), torch.zeros(9).byte()]
    )
    in_payload = multilinear_digests(payload, Places.of_payload(layout, 1, ALL), [0])
    assert in_payload == multilinear_digests(arena.buffer, places_in(arena), [3])


@given(st.sets(st.integers(0, LAYOUT.block_bytes * 8 - 1), min_size=1, max_size=8))
def test_flipped_bits_show(bits: set[int]) -> None:
    places = Places.of_payload(LAYOUT, 1)
    block = torch.randint(
        0, 256, (LAYOUT.block_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    changed = block.clone()
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    assert multilinear_digests(changed, places, [0]) != multilinear_digests(block, places, [0])


def test_swapped_words_and_all_signs_flipped_show() -> None:
    """What a plain sum, or a sum modulo 2**64 of 64-bit words, would miss."""
    places = Places.of_payload(LAYOUT, 1)
    block = torch.arange(LAYOUT.block_bytes, dtype=torch.int64).to(torch.uint8)
    digests = {multilinear_digests(block, places, [0])}
    words = block.view(torch.int32)
    swapped = words.clone()
    swapped[0], swapped[5] = words[5], words[0]
    digests.add(multilinear_digests(swapped.view(torch.uint8), places, [0]))
    digests.add(multilinear_digests((words ^ -(2**31)).view(torch.uint8), places, [0]))
    assert len(digests) == 3


def land(
    digest: str, *, flip: bool, on_gpu: bool, target: KvLayout = LAYOUT
) -> tuple[MemoryFile, MemoryFile]:
    """Blocks 5 and 2 into 1 and 6. A tensor stands in for one on a GPU."""
    source, arena = MemoryFile(), MemoryFile(target, 32, seed=1)
    sent = multilinear_digests(source.buffer, places_in(source, ALL), [5, 2])
    if flip:
        source.buffer[2 * LAYOUT.region_block_bytes[0]] ^= 16
    frame = KvBlocks(0, 0, 2, 0, 2, 2 * LAYOUT.block_bytes, sent)
    lease = Lease(1, 1, ("request", 0), (1, 6), 0)
    data = source.buffer if on_gpu else source.buffer.numpy()
    BlockWriter(arena, lease, LAYOUT, digest).write(
        Source(data, places_in(source, ALL), [5, 2]), frame
    )
    return source, arena


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_lands_is_checked_by_it(on_gpu: bool) -> None:
    source, arena = land(MULTILINEAR, flip=False, on_gpu=on_gpu)
    assert [arena.block(1), arena.block(6)] == [source.block(5), source.block(2)]
    with pytest.raises(DataLoss, match="block 1 arrived with digest"):
        land(MULTILINEAR, flip=True, on_gpu=on_gpu)


def test_what_is_converted_is_checked_by_it() -> None:
    double = KvLayout(LAYOUT.layers, 2 * LAYOUT.block_size, LAYOUT.dtype)
    for on_gpu in (True, False):
        source, arena = MemoryFile(), MemoryFile(double, 4, seed=1)
        sent = multilinear_digests(source.buffer, places_in(source, ALL), [5, 2])
        frame = KvBlocks(0, 0, 2, 0, 2, 2 * LAYOUT.block_bytes, sent)
        writer = BlockWriter(arena, Lease(1, 1, ("request", 0), (3,), 0), LAYOUT, MULTILINEAR)
        data = source.buffer if on_gpu else source.buffer.numpy()
        writer.write(Source(data, places_in(source, ALL), [5, 2]), frame)
        k = LAYOUT.region_block_bytes[0]
        assert arena.block(3)[: 2 * k] == source.block(5)[:k] + source.block(2)[:k]
        with pytest.raises(DataLoss, match="arrived with digest"):
            writer.write(Source(data, places_in(source, ALL), [5, 3]), frame)


def test_a_kind_of_digest_that_is_not_known_is_refused() -> None:
    with pytest.raises(Unimplemented, match="'crc' is unknown; allowed are xxh3 and multilinear"):
        land("crc", flip=False, on_gpu=False)
