"""Pages of memory that the blocks of models with sliding windows take, whatever their sizes."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache, WindowRule
from kvrelay.engine.kvcache.window_parts import BlockUnits
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

CHUNK = 128
LONGEST = 1024
LAYOUTS = st.builds(
    lambda heads, dim, windows, block_size, dtype: KvLayout(
        (LayerKv(heads, dim, dim),) * len(windows), block_size, dtype
    ).with_windows(windows),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([16, 64, 96, 256]),
    st.sampled_from([(64, 0), (64,) * 5 + (0,), (64, 200, 64)]),
    st.sampled_from([8, 16, 32, 48]),
    st.sampled_from(["bfloat16", "int8", "int4"]),
)


class Memory:
    """A cache and the pages of its blocks."""

    def __init__(self, layout: KvLayout, num_bytes: int) -> None:
        blocks = layout.num_blocks_in(num_bytes)
        self.layout, self.pool = layout, KvPool(layout, blocks)
        self.cache = KvCache(
            blocks,
            layout.block_size,
            windows=WindowRule(layout, CHUNK),
            capacity=BlockUnits.in_memory(layout, num_bytes),
            memory=self.pool.vacated,
        )

    def sequence(self, tokens: list[int]) -> Sequence:
        """A sequence with its blocks. Raises OutOfBlocks."""
        spec = SequenceSpec("r", 0, tuple(tokens), len(tokens), SamplingParams())
        sequence = Sequence(spec, 0.0, self.cache.hasher(""))
        sequence.take_prefix(self.cache)
        try:
            sequence.take_blocks(self.cache, len(tokens))
        except OutOfBlocks:
            sequence.drop_blocks(self.cache)
            raise
        return sequence

    def compute(self, sequence: Sequence) -> None:
        """Writes KV to each block that a chunk has."""
        size = self.layout.block_size
        while sequence.uncomputed:
            start, count = sequence.num_computed, min(CHUNK, sequence.uncomputed)
            begin = 0
            for block_bytes in self.layout.region_block_bytes:
                end = begin + self.pool.num_blocks * block_bytes
                region = self.pool.buffer[begin:end].view(-1, block_bytes)
                for place in range(start // size, -(-(start + count) // size)):
                    region[sequence.blocks[place]] = 1
                begin = end
            sequence.advance(self.cache, count)


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, st.integers(0, 2**32 - 1))
@pytest.mark.long
def test_blocks_take_no_more_pages_than_the_memory_has(layout: KvLayout, seed: int) -> None:
    """Blocks may be smaller than pages, or no whole number of them, and come back one by one."""
    assume(layout.windows)
    draw = random.Random(seed)
    most = layout.sequence_bytes(LONGEST, CHUNK) * 3 // 2
    memory = Memory(layout, most)
    running: list[Sequence] = []
    for _ in range(25):
        tokens = [draw.randrange(99) for _ in range(draw.randint(1, LONGEST))]
        while True:
            try:
                running.append(memory.sequence(tokens))
            except OutOfBlocks:
                running.pop(draw.randrange(len(running))).drop_blocks(memory.cache)
            else:
                break
        memory.compute(running[-1])
        memory.cache.check_integrity()
        memory.pool.vacated.settle()
        assert memory.pool.stored_bytes <= most
    memory.pool.close()


@given(LAYOUTS)
def test_the_memory_of_a_sequence_holds_one(layout: KvLayout) -> None:
    assume(layout.windows)
    for length in (1, 500, LONGEST):
        num_bytes = layout.sequence_bytes(length, CHUNK)
        memory = Memory(layout, num_bytes)
        sequence = memory.sequence([5] * length)
        while sequence.uncomputed:
            sequence.advance(memory.cache, min(CHUNK, sequence.uncomputed))
        memory.pool.close()


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "block_size", "saves"),
    [
        (1, 256, "bfloat16", 32, True),
        (8, 64, "int8", 32, True),
        (2, 64, "int8", 16, False),  # half a page
        (1, 96, "bfloat16", 32, False),  # one and a half pages
        (2, 64, "int8", 32, True),
        (2, 64, "int4", 64, True),
    ],
)
def test_windows_are_for_blocks_of_whole_pages(
    heads: int, dim: int, dtype: str, block_size: int, saves: bool
) -> None:
    whole = KvLayout((LayerKv(heads, dim, dim),) * 6, block_size, dtype)
    layout = whole.with_windows((64,) * 5 + (0,))
    assert bool(layout.windows) == saves
    assert (layout == whole) != saves
