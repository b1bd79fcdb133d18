"""What goes to the tiers: copies of blocks as they were, under the key of their content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.toy_engine import BLOCK, LAYOUT, Arena
from support.stores import until

from kv_transfer.blocks.single_blocks import BlockCopy, copies_of, write_copies
from kvrelay.clock import MonotonicClock
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.worker.tiers import disk_tier, tier_store
from kvrelay.worker.tiers.host_tier import HostTier
from kvrelay.worker.tiers.slot_folder import SlotFolder
from kvrelay.worker.tiers.tier_store import TierStore

BLOCKS = 8


class Pool:
    """A cache over an arena with known bytes, and a host tier behind it."""

    def __init__(self) -> None:
        self.cache = KvCache(BLOCKS, BLOCK, model="m", hash_bytes=2)
        self.arena = Arena(BLOCKS, 1)
        self.host = HostTier(100 * LAYOUT.block_bytes, LAYOUT.block_bytes)
        self.store = TierStore(self.cache, self.arena, [self.host])

    def publish(self, tokens: Sequence[int], fill: int) -> list[int]:
        """Blocks of a sequence, filled, published and released."""
        prefix = self.cache.hasher("salt")
        prefix.extend(tokens)
        blocks = self.cache.allocate(len(prefix.hashes))
        for block in blocks:
            self.fill(block, fill)
        self.cache.publish(prefix, blocks, 0, len(blocks), "tenant")
        self.cache.release(blocks)
        return blocks

    def fill(self, block: int, value: int) -> None:
        for region in self.arena.regions:
            region.reshape(BLOCKS, -1)[block] = value

    async def run_until(self, true: Callable[[], bool]) -> None:
        """Runs the store until something holds."""
        running = asyncio.create_task(self.store.run())
        try:
            async with asyncio.timeout(30):
                while not true():
                    self.store.keep_house()
                    await asyncio.sleep(0.005)
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_cached_blocks_are_copied_before_they_are_evicted() -> None:
    pool = Pool()
    pool.publish(range(6 * BLOCK), 7)
    await pool.run_until(lambda: pool.host.num_blocks == 6)
    for block in pool.host.unsaved():
        assert set(block.copy.data) == {7}
        assert block.key.tenant == "tenant"
    assert pool.cache.pool.num_held == 0
    pool.cache.check_integrity()


async def test_nothing_is_copied_while_most_blocks_are_free() -> None:
    pool = Pool()
    pool.publish(range(3 * BLOCK), 7)
    await pool.run_until(lambda: True)
    await asyncio.sleep(0.05)
    assert pool.host.num_blocks == 0


async def test_a_block_that_changes_during_its_copy_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    pool.publish(range(6 * BLOCK), 7)

    async def meanwhile(function: Callable[..., object], *arguments: object) -> object:
        """A new sequence takes all blocks while they are copied."""
        taken = pool.cache.allocate(BLOCKS)
        for block in taken:
            pool.fill(block, 9)
        found = function(*arguments)
        pool.cache.release(taken)
        return found

    monkeypatch.setattr(tier_store, "in_thread", meanwhile)
    await pool.run_until(lambda: pool.host.counts.dropped > 0)
    assert pool.host.num_blocks == 0


async def test_a_block_whose_kv_is_in_doubt_is_removed() -> None:
    pool = Pool()
    blocks = pool.publish(range(6 * BLOCK), 7)
    await pool.run_until(lambda: pool.host.num_blocks == 6)
    held = pool.cache.find(range(6 * BLOCK), "salt")
    assert held == blocks
    pool.cache.withdraw(held)
    pool.cache.release(held)
    assert pool.host.num_blocks == 0


async def test_a_block_that_comes_into_doubt_while_memory_is_saved_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "STAGING_BYTES", 1)
    pool = Pool()
    folder = SlotFolder(tmp_path, "0" * 16, LAYOUT.block_bytes)
    disk = disk_tier.DiskTier(folder, 2**20, LAYOUT.block_bytes, MonotonicClock())
    pool.store = TierStore(pool.cache, pool.arena, [pool.host, disk])
    pool.publish(range(6 * BLOCK), 7)
    await pool.run_until(lambda: disk.works and pool.host.num_blocks == 6)
    held = pool.cache.find(range(6 * BLOCK), "salt")
    running = asyncio.create_task(pool.store.run())
    await until(lambda: disk.works)
    saving = asyncio.create_task(pool.store.flush())
    await until(lambda: disk.num_blocks > 0)
    pool.cache.withdraw(held)
    pool.cache.release(held)
    await saving
    assert pool.host.num_blocks == 0
    await until(lambda: not disk.num_blocks and disk.is_drained)
    running.cancel()
    await asyncio.wait({running})
    await disk.close()


@given(st.lists(st.integers(0, 255), min_size=1, max_size=BLOCKS), st.data())
def test_copies_come_back_as_they_were(fills: list[int], data: st.DataObject) -> None:
    arena = Arena(BLOCKS, 1)
    blocks = data.draw(st.permutations(range(BLOCKS)))[: len(fills)]
    for block, fill in zip(blocks, fills, strict=True):
        for number, region in enumerate(arena.regions):
            region.reshape(BLOCKS, -1)[block] = (fill + number) % 256
    copies = copies_of(arena, blocks)
    before = arena.buffer.clone()
    arena.buffer.fill_(0xAA)
    bad = data.draw(st.integers(0, len(fills)))
    if bad < len(fills):
        changed = copies[bad].data.copy()
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1
        copies[bad] = BlockCopy(changed, copies[bad].digest)
    assert write_copies(arena, blocks, copies) == bad
    for block in blocks[:bad]:
        places = [
            (start + block * size, size)
            for start, size in zip(
                np.cumsum([0, *(BLOCKS * size for size in LAYOUT.region_block_bytes[:-1])]),
                LAYOUT.region_block_bytes,
                strict=True,
            )
        ]
        for start, size in places:
            assert arena.buffer[start : start + size].equal(before[start : start + size])


tokens = st.lists(st.integers(0, 3), min_size=BLOCK, max_size=3 * BLOCK)


@given(st.tuples(st.sampled_from("mn"), st.sampled_from(("", "s", "t")), tokens), st.data())
def test_identities_differ_by_model_salt_and_tokens(
    one: tuple[str, str, list[int]], data: st.DataObject
) -> None:
    """However short the hashes are."""
    other = data.draw(
        st.tuples(st.sampled_from("mn"), st.sampled_from(("", "s", "t")), st.just(one[2]))
        | st.tuples(st.sampled_from("mn"), st.sampled_from(("", "s", "t")), tokens)
    )

    def identities(model: str, salt: str, sequence: list[int]) -> list[bytes]:
        hasher = BlockHasher(BLOCK, salt, model=model, hash_bytes=1)
        # In two parts, as a sequence grows.
        hasher.extend(sequence[:BLOCK])
        hasher.identities()
        hasher.extend(sequence)
        return hasher.identities()

    for index, (left, right) in enumerate(zip(identities(*one), identities(*other), strict=False)):
        end = (index + 1) * BLOCK
        same = (*one[:2], one[2][:end]) == (*other[:2], other[2][:end])
        assert (left == right) == same
