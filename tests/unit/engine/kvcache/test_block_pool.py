from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.kvcache.block_pool import BlockPool, IntegrityError, OutOfBlocks

HASHES = st.sampled_from([bytes([one]) for one in range(13)])
# So that blocks of one hash have unlike contents, and blocks of one content meet
CONTENTS = st.integers(0, 3)
OWNERS = ("", "a", "b")


class NaivePool:
    """What a pool should be, in the plainest words: dictionaries and a list, no indexes."""

    def __init__(self, num_blocks: int) -> None:
        self.free = set(range(num_blocks))
        self.held: dict[int, int] = {}
        self.cached: list[int] = []  # least recently used first
        self.names: dict[int, bytes] = {}  # block to hash
        self.contents: dict[int, int] = {}  # of named blocks
        self.serials = dict.fromkeys(range(num_blocks), 0)
        self.owners: dict[int, str] = {}  # of named blocks
        self.generations = dict.fromkeys(range(num_blocks), 0)

    def count(self, owner: str) -> int:
        return sum(self.owners[block] == owner for block in self.cached)

    def forget(self, block: int) -> None:
        if block in self.cached:
            self.cached.remove(block)
            self.free.add(block)
        del self.names[block], self.owners[block], self.contents[block]

    def named(self, hash: bytes) -> int | None:
        return next((block for block, known in self.names.items() if known == hash), None)

    def allocated(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.remove(block)
            self.held[block] = 1
            self.generations[block] += 1
            self.serials[block] = 0

    def release(self, block: int) -> None:
        self.held[block] -= 1
        if self.held[block] == 0:
            del self.held[block]
            if block in self.names:
                self.cached.append(block)
            else:
                self.free.add(block)


def longest_run(blocks: set[int]) -> int:
    longest = length = 0
    for block in range(max(blocks, default=0) + 1):
        length = length + 1 if block in blocks else 0
        longest = max(longest, length)
    return longest


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 16))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.model = NaivePool(num_blocks)
        self.given: set[int] = set()  # serials

    @rule(n=st.integers(0, 8), data=st.data())
    def allocate(self, n: int, data: st.DataObject) -> None:
        after = data.draw(st.sampled_from([None, *sorted(self.model.held)]), label="after")
        available = len(self.model.free) + len(self.model.cached)
        if n > available:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(n, after)
            assert (caught.value.wanted, caught.value.available) == (n, available)
            return
        before = {owner: self.model.count(owner) for owner in OWNERS}
        blocks = self.pool.allocate(n, after)
        # Of owners who have equally many it does not matter who loses one; of an owner's blocks it
        # does.
        gone = [
            block
            for block, hash in self.model.names.items()
            if self.pool.lookup(hash, self.model.contents[block]) != block
        ]
        assert len(gone) == max(0, n - len(self.model.free)), "no more than are needed"
        for owner in OWNERS:
            mine = [block for block in self.model.cached if self.model.owners[block] == owner]
            lost = [block for block in mine if block in gone]
            assert lost == mine[: len(lost)], "the least recently used go first"
        for block in gone:
            self.model.forget(block)
        left = {owner: self.model.count(owner) for owner in OWNERS}
        for one, other in itertools.permutations(OWNERS, 2):
            if left[one] < before[one]:
                assert left[one] >= left[other] - 1, f"{one} lost blocks while {other} had more"
        candidates = set(self.model.free)
        assert len(set(blocks)) == n
        assert set(blocks) <= candidates
        if n and after is not None and after + 1 in candidates:
            assert blocks[0] == after + 1, "the sequence goes on where it was"
        elif longest_run(candidates) >= n > 0:
            assert blocks == list(range(blocks[0], blocks[0] + n))
        self.model.allocated(blocks)

    @precondition(lambda self: self.model.held or self.model.cached)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        for block in data.draw(
            st.lists(st.sampled_from([*self.model.held, *self.model.cached]), max_size=4),
            label="blocks",
        ):
            self.pool.hold([block])
            if block in self.model.cached:
                self.model.cached.remove(block)
            self.model.held[block] = self.model.held.get(block, 0) + 1

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(
            st.lists(st.sampled_from(sorted(self.model.held)), unique=True), label="blocks"
        )
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.model.release(block)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), hash=HASHES, content=CONTENTS, owner=st.sampled_from(OWNERS))
    def name(self, data: st.DataObject, hash: bytes, content: int, owner: str) -> None:
        model = self.model
        block = data.draw(st.sampled_from(sorted(model.held)), label="block")
        if block in model.names and model.contents[block] != content:
            with pytest.raises(
                IntegrityError,
                match=f"block {block} gets a hash, but it has the hash of other content",
            ):
                self.pool.name(block, hash, content, owner)
            return
        serial = self.pool.name(block, hash, content, owner)
        other = model.named(hash)
        if block in model.names:
            assert serial == model.serials[block], "a second time changes nothing"
        elif other is not None and model.contents[other] == content:
            assert serial == model.serials[other], "one content has one serial"
        else:
            if other is not None:
                model.forget(other)
            assert serial > max(self.given, default=0), "a new content has a new serial"
            model.names[block], model.contents[block], model.owners[block] = hash, content, owner
        self.given.add(serial)
        model.serials[block] = serial

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """What nobody holds can be neither released nor named, and what is free cannot be held."""
        unheld = sorted(self.model.free | set(self.model.cached))
        if unheld:
            block = data.draw(st.sampled_from(unheld), label="block")
            with pytest.raises(IntegrityError, match=f"block {block}"):
                self.pool.release([block])
            with pytest.raises(IntegrityError, match=f"block {block}"):
                self.pool.name(block, b"99", 0)
            if block in self.model.free:
                with pytest.raises(IntegrityError, match="is free"):
                    self.pool.hold([block])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.model.free)
        assert self.pool.num_cached == len(self.model.cached)
        assert {one: self.pool.cached_of(one) for one in OWNERS} == {
            one: self.model.count(one) for one in OWNERS
        }
        assert self.pool.num_held == len(self.model.held)
        assert self.pool.units_available == self.pool.num_free + self.pool.num_cached
        for hash, content in itertools.product((bytes([one]) for one in range(13)), range(4)):
            block = self.model.named(hash)
            fits = block is not None and self.model.contents[block] == content
            assert self.pool.lookup(hash, content) == (block if fits else None)
        assert {
            block: self.pool.serial(block) for block in self.model.serials
        } == self.model.serials
        assert {
            block: self.pool.generation(block) for block in self.model.generations
        } == self.model.generations


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_growing_sequence_stays_one_run() -> None:
    pool = BlockPool(16)
    sequence = pool.allocate(2)
    for _ in range(3):
        sequence += pool.allocate(1, after=sequence[-1])
    assert sequence == [0, 1, 2, 3, 4]


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.release([0, 1, 2, 3, 6, 7])
    assert pool.allocate(2) == [6, 7]
    assert pool.allocate(3) == [0, 1, 2]


def test_too_many_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.name(block, b"7", 7)
    pool.release([block])
    with pytest.raises(OutOfBlocks, match="5 units of blocks wanted, 4 available"):
        pool.allocate(5)
    assert pool.lookup(b"7", 7) == block
    assert pool.num_free == 3


def test_a_block_is_given_back_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match=f"block {blocks[1]} is released, but no sequence"):
        pool.release(blocks)
    assert pool.num_free == 4


def test_the_end_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.name(block, bytes([number]), number)
    pool.release(blocks)
    pool.allocate(1)
    assert [pool.lookup(bytes([number]), number) for number in range(3)] == [0, 1, None]


def cached(pool: BlockPool, n: int, owner: str, first: int) -> list[bytes]:
    """The hashes of `n` blocks that the owner had, and left in the cache; each is its content,
    too.
    """
    blocks = pool.allocate(n)
    hashes = [number.to_bytes(4, "little") for number in range(first, first + n)]
    for block, hash in zip(blocks, hashes, strict=True):
        pool.name(block, hash, hash, owner)
    pool.release(blocks)
    return hashes


def test_one_tenant_cannot_flush_what_another_has_cached_within_its_share() -> None:
    pool = BlockPool(100)
    modest = cached(pool, 30, "modest", 0)
    for turn in range(20):
        cached(pool, 40, "greedy", 1000 * (turn + 1))
    assert [pool.lookup(hash, hash) is not None for hash in modest] == [True] * 30
    cached(pool, 40, "modest", 100_000)
    assert (pool.cached_of("modest"), pool.cached_of("greedy")) == (70, 30), (
        "and what nobody else uses is anyone's"
    )
    cached(pool, 20, "greedy", 200_000)
    assert (pool.cached_of("modest"), pool.cached_of("greedy")) == (50, 50), "who has more gives"
    pool.check_integrity()


def test_shares_of_the_cache_do_not_keep_anybody_from_running() -> None:
    pool = BlockPool(10)
    cached(pool, 5, "a", 0)
    cached(pool, 5, "b", 100)
    assert len(pool.allocate(10)) == 10


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._references.__setitem__(0, 0), r"lost: \[0\]"),
        (lambda pool: pool._references.__setitem__(3, 1), r"both free and cached or held: \[3\]"),
        (lambda pool: pool._references.__setitem__(1, 1), r"both cached and held: \[1\]"),
        (lambda pool: pool._references.__setitem__(3, -1), r"negative number of times: \[3\]"),
        (lambda pool: pool._block_of.clear(), r"named one way only: \[1\]"),
        (lambda pool: pool._block_of.__setitem__(b"9", 1), r"2 hashes for 1 hashed blocks"),
        (lambda pool: pool._contents.clear(), r"named without a content: \[1\]"),
        (lambda pool: pool._serials.__setitem__(1, 0), r"named without a serial: \[1\]"),
        (lambda pool: pool._hash_of.clear(), r"cached without a name: \[1\]"),
        (lambda pool: pool._run_start.clear(), "indexes of free runs"),
        (lambda pool: pool._owners.__setitem__(1, "b"), r"cached as another's: \[1\]"),
        (lambda pool: setattr(pool._cached, "_total", 0), "1 blocks are cached, 0 counted"),
        (
            lambda pool: pool._cached._changed.clear(),
            r"cached blocks of \[''\] would never be "
            r"given up",
        ),
        (lambda pool: setattr(pool, "num_free", 5), "2 blocks are free, but 5 are counted"),
    ],
)
def test_integrity_check_says_what_is_off(corrupt: object, message: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.name(1, b"42", 42)
    pool.release([1])
    pool.check_integrity()
    corrupt(pool)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()
