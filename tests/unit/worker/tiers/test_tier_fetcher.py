"""What a fetch does with blocks that come into doubt before it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulation.toy_engine import BLOCK, LAYOUT, Arena
from support.tiers_first import read_always

from kv_transfer.blocks.single_blocks import copies_of
from kvrelay.clock import MonotonicClock
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence as RunningSequence
from kvrelay.worker.tiers import tier_fetcher
from kvrelay.worker.tiers.host_tier import HostTier
from kvrelay.worker.tiers.tier import StoredBlock
from kvrelay.worker.tiers.tier_fetcher import TierFetcher
from kvrelay.worker.tiers.tier_store import TierStore

BLOCKS, PREFIX = 16, 3
TOKENS = tuple(range(PREFIX * BLOCK + 1))


class Host:
    """A cache without the prefix of a prompt, and a host tier that has it."""

    def __init__(self) -> None:
        self.cache = KvCache(BLOCKS, BLOCK, model="m", hash_bytes=2)
        self.arena = Arena(BLOCKS, 1)
        self.tier = HostTier(100 * LAYOUT.block_bytes, LAYOUT.block_bytes)
        self.store = TierStore(self.cache, self.arena, [self.tier])
        blocks = self.compute()
        for block, copy in zip(blocks, copies_of(self.arena, blocks), strict=True):
            key = self.cache.key_of(block)
            assert key is not None
            self.tier.offer(StoredBlock(key, copy))
        self.cache.release(blocks)
        self.cache.release(self.cache.allocate(BLOCKS))
        assert not self.cached()

    def compute(self) -> list[int]:
        """Another sequence has the prefix, and holds its blocks."""
        prefix = self.cache.hasher("")
        prefix.extend(TOKENS)
        blocks = self.cache.allocate(PREFIX)
        self.cache.publish(prefix, blocks, 0, PREFIX)
        return blocks

    def fails(self, blocks: Sequence[int]) -> None:
        """The sequence that holds the blocks fails."""
        self.cache.withdraw(blocks)
        self.cache.release(blocks)

    def cached(self) -> int:
        """Blocks of the prefix that requests find."""
        blocks = self.cache.find(TOKENS, "")
        self.cache.release(blocks)
        return len(blocks)

    async def fetch(self) -> RunningSequence:
        context = SimpleNamespace(
            cache=self.cache,
            clock=MonotonicClock(),
            runner=SimpleNamespace(layout=LAYOUT, kv=self.arena),
        )
        spec = SequenceSpec("r", 0, TOKENS, len(TOKENS), SamplingParams())
        sequence = RunningSequence(spec, 0.0, self.cache.hasher(""))
        await TierFetcher(cast(Any, context), self.store).fetch(sequence)
        return sequence


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come one by one, however busy this machine is."""
    read_always(monkeypatch)
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    monkeypatch.setattr(tier_fetcher, "_CHUNK_BYTES", 1)


async def test_a_prefix_comes_block_by_block() -> None:
    host = Host()
    sequence = await host.fetch()
    assert sequence.num_computed == sequence.fetched_tokens == PREFIX * BLOCK
    assert host.cached() == PREFIX


@pytest.mark.parametrize("arrived", range(1, PREFIX + 1))
async def test_blocks_that_come_into_doubt_after_they_were_read_are_not_used(
    arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, copied = Host(), 0

    async def fails_meanwhile(function: Callable[..., int], *arguments: object) -> int:
        nonlocal copied
        found = function(*arguments)
        copied += 1
        if copied == arrived:
            host.fails(host.compute())
        return found

    monkeypatch.setattr(tier_fetcher, "in_thread", fails_meanwhile)
    sequence = await host.fetch()
    assert copied == arrived
    assert not sequence.blocks
    assert sequence.num_computed == sequence.fetched_tokens == 0
    assert host.cached() == 0
    host.cache.check_integrity()
