from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.blocks import OutOfBlocks
from kvrelay.engine.cache import KvCache
from kvrelay.engine.hashing import block_hashes

BLOCK_SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # few token ids, so that prefixes are shared


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, and go. The model maps each prefix to the block that must be found for it."""

    @initialize(num_blocks=st.integers(2, 10))
    def start(self, num_blocks: int) -> None:
        self.cache = KvCache(num_blocks, BLOCK_SIZE)
        self.findable: dict[tuple[int, ...], int] = {}
        self.running: list[list[int]] = []  # their blocks

    @rule(prompt=PROMPTS)
    def admit(self, prompt: list[int]) -> None:
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]
        limit = len(prompt) - 1
        expected = [
            self.findable[prefix]
            for prefix in takewhile(lambda prefix: prefix in self.findable and len(prefix) <= limit, prefixes)
        ]
        hashes = block_hashes(prompt, BLOCK_SIZE)
        blocks = self.cache.match(hashes, limit)
        assert blocks == expected
        try:
            new = self.cache.allocate(-(-len(prompt) // BLOCK_SIZE) - len(blocks))
        except OutOfBlocks:
            self.cache.release(blocks)
            return
        self.findable = {prefix: block for prefix, block in self.findable.items() if block not in new}
        blocks += new
        self.cache.publish(hashes, blocks[: len(hashes)])
        for prefix, block in zip(prefixes, blocks[: len(hashes)], strict=True):
            self.findable.setdefault(prefix, block)
        self.running.append(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.cache.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1), label="sequence")))

    @invariant()
    def books_balance(self) -> None:
        self.cache.check_integrity()
        assert self.cache.pool.num_held == len({block for blocks in self.running for block in blocks})


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(cache: KvCache, hashes: list[int]) -> list[int]:
    blocks = cache.allocate(len(hashes))
    cache.publish(hashes, blocks)
    return blocks


def test_match_ends_at_the_limit_and_at_the_first_gap() -> None:
    cache = KvCache(8, 4)
    blocks = filled(cache, [10, 11, 12])
    assert cache.match([10, 11, 12], limit_tokens=11) == blocks[:2]
    assert cache.match([10, 99, 12], limit_tokens=12) == blocks[:1]
    assert cache.match([10], limit_tokens=0) == []


def test_a_match_holds_its_blocks() -> None:
    cache = KvCache(2, 4)
    cache.release(filled(cache, [10]))
    matched = cache.match([10], 4)
    assert cache.allocate(1) != matched
    with pytest.raises(OutOfBlocks):
        cache.allocate(1)


def test_a_duplicate_stays_unnamed_and_is_free_again_at_its_end() -> None:
    cache = KvCache(4, 4)
    first, second = filled(cache, [10]), filled(cache, [10])
    assert cache.match([10], 4) == first
    cache.release(second)
    assert cache.pool.num_free == 3
    cache.check_integrity()


def test_without_prefix_cache_nothing_is_found() -> None:
    cache = KvCache(4, 4, prefix_cache=False)
    cache.release(filled(cache, [10, 11]))
    assert cache.match([10, 11], 8) == []
    assert cache.pool.num_free == 4


def test_a_block_is_not_found_after_other_blocks() -> None:
    """Equal tokens have other KV behind another beginning."""
    cache = KvCache(8, 2)
    filled(cache, block_hashes([1, 2, 8, 9], 2))
    filled(cache, block_hashes([8, 9], 2))
    assert len(cache.match(block_hashes([3, 4, 8, 9], 2), limit_tokens=4)) == 0
    assert len(set(block_hashes([8, 9, 8, 9], 2))) == 2
