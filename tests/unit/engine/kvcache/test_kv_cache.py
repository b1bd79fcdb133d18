from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.few_hashes import CUTS, CollidingCache, Cut, one_for_all, one_for_each_place

from kvrelay.engine.kvcache.block_hashes import BlockHasher, hashed
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache

BLOCK_SIZE = 2
# Few token ids, so that prefixes are shared
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


Prefix = tuple[str, tuple[int, ...]]  # salt, tokens


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share prefixes, and go. The model maps each prefix to the block that must be
    found for it.

    Where hashes collide, a prefix may be forgotten, but what is found is the prefix that was asked
    for.
    """

    @initialize(num_blocks=st.integers(2, 10), cut=st.sampled_from([None, *CUTS]))
    def start(self, num_blocks: int, cut: Cut | None) -> None:
        self.exact = cut is None
        self.cache = (
            KvCache(num_blocks, BLOCK_SIZE)
            if cut is None
            else CollidingCache(num_blocks, BLOCK_SIZE, cut)
        )
        self.findable: dict[Prefix, int] = {}
        self.written: dict[int, Prefix] = {}  # whose KV lies in a block
        self.running: list[list[int]] = []  # their blocks

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "", "other"]))
    def admit(self, prompt: list[int], salt: str) -> None:
        prefixes = [
            (salt, tuple(prompt[:end])) for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        ]
        limit = len(prompt) - 1
        expected = [
            self.findable[prefix]
            for prefix in takewhile(
                lambda prefix: prefix in self.findable and len(prefix[1]) <= limit, prefixes
            )
        ]
        hasher = self.cache.hasher(salt)
        hasher.extend(prompt)
        blocks = self.cache.match(hasher, limit)
        assert [self.written[block] for block in blocks] == prefixes[: len(blocks)], (
            "KV of another sequence"
        )
        if self.exact:
            assert blocks == expected
        try:
            new = self.cache.allocate(-(-len(prompt) // BLOCK_SIZE) - len(blocks))
        except OutOfBlocks:
            self.cache.release(blocks)
            return
        self.findable = {
            prefix: block for prefix, block in self.findable.items() if block not in new
        }
        known = len(blocks)
        blocks += new
        self.written |= dict(zip(blocks[known:], prefixes[known:], strict=False))
        self.cache.publish(hasher, blocks, known, len(prefixes))
        for prefix, block in zip(prefixes, blocks, strict=False):
            self.findable.setdefault(prefix, block)
        self.running.append(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.cache.release(
            self.running.pop(data.draw(st.integers(0, len(self.running) - 1), label="sequence"))
        )

    @invariant()
    def books_balance(self) -> None:
        self.cache.check_integrity()
        assert self.cache.pool.num_held == len(
            {block for blocks in self.running for block in blocks}
        )


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(cache: KvCache, prefix: BlockHasher) -> list[int]:
    blocks = cache.allocate(len(prefix.hashes))
    cache.publish(prefix, blocks, 0, len(blocks))
    return blocks


def test_match_ends_at_the_limit_and_at_the_first_gap() -> None:
    cache = KvCache(8, 2)
    blocks = filled(cache, hashed([1, 2, 3, 4, 5, 6], 2))
    assert cache.match(hashed([1, 2, 3, 4, 5, 6], 2), limit_tokens=5) == blocks[:2]
    assert cache.match(hashed([1, 2, 3, 9, 5, 6], 2), limit_tokens=6) == blocks[:1]
    assert cache.match(hashed([1, 2], 2), limit_tokens=0) == []


def test_a_match_holds_its_blocks() -> None:
    cache = KvCache(2, 2)
    cache.release(filled(cache, hashed([1, 2], 2)))
    matched = cache.match(hashed([1, 2], 2), 2)
    assert cache.allocate(1) != matched
    with pytest.raises(OutOfBlocks):
        cache.allocate(1)


def test_a_duplicate_stays_unnamed_and_is_free_again_at_its_end() -> None:
    cache = KvCache(4, 2)
    first, second = filled(cache, hashed([1, 2], 2)), filled(cache, hashed([1, 2], 2))
    assert cache.match(hashed([1, 2], 2), 2) == first
    cache.release(second)
    assert cache.pool.num_free == 3
    cache.check_integrity()


def test_what_follows_a_duplicate_is_found_behind_the_one_that_has_the_name() -> None:
    """Two sequences compute one beginning at the same time; the second goes on."""
    cache = KvCache(8, 2)
    prefix = hashed([1, 2, 3, 4], 2)
    first = filled(cache, hashed([1, 2], 2))
    second = cache.allocate(2)
    cache.publish(prefix, second, 0, 1)
    cache.publish(prefix, second, 1, 2)
    assert cache.match(prefix, 4) == [first[0], second[1]]


def test_without_prefix_cache_nothing_is_found() -> None:
    cache = KvCache(4, 2, prefix_cache=False)
    cache.release(filled(cache, hashed([1, 2, 3, 4], 2)))
    assert cache.match(hashed([1, 2, 3, 4], 2), 4) == []
    assert cache.pool.num_free == 4


def test_a_block_is_not_found_after_other_blocks() -> None:
    """Equal tokens have other KV behind another beginning."""
    cache = KvCache(8, 2)
    filled(cache, hashed([1, 2, 8, 9], 2))
    filled(cache, hashed([8, 9], 2))
    assert len(cache.match(hashed([3, 4, 8, 9], 2), limit_tokens=4)) == 0


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
    st.text(max_size=3),
    st.text(max_size=3),
)
def test_hashes_are_of_all_tokens_before_and_of_the_salt(
    one: list[int], other: list[int], salt: str, other_salt: str
) -> None:
    here, there = hashed(one, 2, salt), hashed(other, 2, other_salt)
    for end, (mine, theirs) in enumerate(zip(here.hashes, there.hashes, strict=True), 1):
        same = (salt, one[: 2 * end]) == (other_salt, other[: 2 * end])
        assert (mine == theirs) == same
        assert len(mine) == 16, (
            "bytes: 128 bits, so that no second prompt with this hash can be searched for"
        )


def test_hashes_are_of_the_model() -> None:
    hashers = [BlockHasher(2, "salt", model=model) for model in ("a", "b")]
    one, other = (hasher.extend([1, 2]) for hasher in hashers)
    assert one != other


def test_a_prefix_is_hashed_the_same_whole_and_as_it_grows() -> None:
    tokens = list(range(20))
    growing = BlockHasher(4, "salt")
    for end in range(21):
        growing.extend(tokens[:end])
    assert growing.hashes == hashed(tokens, 4, "salt").hashes


@pytest.mark.parametrize(
    ("tokens", "salt"),
    [([1, 2, 3, 9], ""), ([9, 2, 3, 4], ""), ([1, 2, 3, 4], "other")],
    ids=["last block", "first block", "salt"],
)
def test_a_block_of_the_same_hash_and_other_content_is_not_taken(
    tokens: list[int], salt: str
) -> None:
    cache = CollidingCache(8, 4, one_for_all)
    blocks = cache.allocate(1)
    asked = cache.hasher("")
    asked.extend([1, 2, 3, 4])
    cache.publish(asked, blocks, 0, 1)
    assert cache.find([1, 2, 3, 4], "") == blocks
    assert cache.hasher(salt).extend(tokens) == asked.hashes
    assert cache.find(tokens, salt) == []


def test_equal_tokens_after_a_collision_are_not_taken() -> None:
    """Their KV is of what came before, so comparing a block's own tokens is not enough."""
    cache = CollidingCache(8, 2, one_for_each_place)
    theirs, mine = cache.hasher(""), cache.hasher("")
    theirs.extend([1, 2, 7, 7])
    mine.extend([3, 4, 7, 7])
    cache.publish(theirs, cache.allocate(2), 0, 2)
    first = cache.allocate(1)
    cache.publish(mine, first, 0, 1)
    assert mine.hashes[1] == theirs.hashes[1]
    assert cache.match(mine, 4) == first


def test_a_sequence_whose_blocks_all_collide_is_found_as_far_as_they_are_its_own() -> None:
    cache = CollidingCache(8, 2, one_for_each_place)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]):
        prefix = cache.hasher("")
        prefix.extend(tokens)
        blocks = cache.allocate(2)
        cache.publish(prefix, blocks, 0, 2)
        assert cache.find(tokens, "") == blocks, "the newest of one hash is found"
        cache.release(blocks)
        cache.release(blocks)
    cache.check_integrity()
    assert (cache.pool.num_cached, cache.pool.num_free) == (2, 6), "those that gave way are free"
