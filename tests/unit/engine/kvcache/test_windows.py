"""Blocks without their windowed parts: whatever a sequence still reads is there, and blocks never
take more memory than there is.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kvcache.block_pool import BlockPool, IntegrityError, OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache, WindowRule
from kvrelay.engine.kvcache.window_parts import BlockUnits
from kvrelay.types import kv_layout
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

SIZE = 4
CHUNK = 8


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_layout, "ROUND", 2)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of `layout` takes a page in each region."""
    monkeypatch.setattr(kv_layout, "PAGE", 128)


def layout(*windows: int) -> KvLayout:
    return KvLayout((LayerKv(1, 8, 8),) * len(windows), SIZE, "float32", windows=windows)


class Memory:
    """A cache, and for each part of its blocks the tokens whose KV it holds, up to its end."""

    def __init__(self, windows: tuple[int, ...], capacity: int) -> None:
        self.layout = layout(*windows)
        self.units = BlockUnits.of(self.layout)
        self.held: dict[tuple[int, bool], list[int]] = {}
        # Parts whose memory is to be given back.
        self.waiting: set[tuple[int, bool]] = set()
        self.cache = KvCache(
            capacity // self.units.unwindowed,
            SIZE,
            windows=WindowRule(self.layout, CHUNK),
            capacity=capacity,
            memory=self,
        )

    def give_up(self, blocks: SequenceOf[int], *, only_windowed: bool = False) -> None:
        self.waiting.update((block, True) for block in blocks)
        if not only_windowed:
            self.waiting.update((block, False) for block in blocks)

    def take(self, blocks: Collection[int], *, windowed: bool) -> None:
        self.waiting.difference_update((block, windowed) for block in blocks)

    def give_back(self, draw: random.Random) -> None:
        """The memory of some parts that wait goes, at any time."""
        for one in sorted(self.waiting):
            if draw.random() < 0.3:
                self.waiting.discard(one)
                self.held.pop(one, None)

    def write(self, sequence: Sequence, count: int) -> None:
        """A step computes tokens, which reads all that their windows reach."""
        start, tokens = sequence.num_computed, sequence.tokens.tolist()
        oldest = max(0, start + 1 - self.layout.window)
        for place in range(-(-start // SIZE)):
            stored = tokens[: min(start, (place + 1) * SIZE)]
            block = sequence.blocks[place]
            assert self.held[block, False][: len(stored)] == stored
            if (place + 1) * SIZE > oldest:
                assert place in sequence.window
                assert self.held[block, True][: len(stored)] == stored
        for place in range(start // SIZE, -(-(start + count) // SIZE)):
            assert place in sequence.window
            for windowed in (False, True):
                end = min(start + count, (place + 1) * SIZE)
                self.held[sequence.blocks[place], windowed] = tokens[:end]

    def check(self) -> None:
        self.cache.check_integrity()
        pool = self.cache.pool
        taken = sum(
            self.units.windowed if windowed else self.units.unwindowed
            for _, windowed in self.held.keys() - self.waiting
        )
        assert taken <= pool.capacity


def a_sequence(memory: Memory, tokens: list[int], tenant: str) -> Sequence:
    spec = SequenceSpec("r", 0, tuple(tokens), len(tokens), SamplingParams(), "", tenant=tenant)
    return Sequence(spec, 0.0, memory.cache.hasher(""))


@settings(max_examples=300, deadline=None)
@given(
    windows=st.sampled_from([(0, 6), (5, 0, 9), (7,), (3, 3, 3, 0), (0, 0, 1)]),
    capacity=st.integers(12, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_read_is_there(windows: tuple[int, ...], capacity: int, seed: int) -> None:
    """Sequences with common prefixes come, are computed in chunks, grow, are handed over and end,
    in any order.
    """
    draw = random.Random(seed)
    memory = Memory(windows, capacity * BlockUnits.of(layout(*windows)).all)
    cache, running = memory.cache, list[Sequence]()
    stems = [[draw.randrange(9) for _ in range(80)] for _ in range(3)]
    for _ in range(120):
        memory.give_back(draw)
        kind = draw.random()
        if kind < 0.3:
            stem = draw.choice(stems)
            tail = [draw.randrange(9) for _ in range(draw.randint(0, 6))]
            new = a_sequence(memory, stem[: draw.randint(1, 80)] + tail, draw.choice("ab"))
            handed_over = draw.random() < 0.3
            new.take_prefix(cache, receives=handed_over)
            length = len(new.tokens)
            cached = new.num_computed
            try:
                new.take_blocks(cache, length, length if handed_over else None)
            except OutOfBlocks:
                new.drop_blocks(cache)
            else:
                if handed_over:
                    receive(memory, new, cached)
                running.append(new)
        elif running and kind < 0.85:
            one = draw.choice(running)
            if one.uncomputed == 0:
                one.tokens.append(draw.randrange(9))
                try:
                    one.take_blocks(cache, len(one.tokens))
                except OutOfBlocks:
                    running.remove(one)
                    one.drop_blocks(cache)
                    continue
            count = draw.randint(1, min(CHUNK, one.uncomputed))
            memory.write(one, count)
            one.advance(cache, count)
        elif running:
            one = running.pop(draw.randrange(len(running)))
            if draw.random() < 0.2:
                cache.withdraw(one.blocks)
            one.drop_blocks(cache)
        memory.check()
    for one in running:
        one.drop_blocks(cache)
    memory.check()
    assert cache.pool.units_available == cache.pool.capacity


def receive(memory: Memory, sequence: Sequence, cached: int) -> None:
    """The KV of a hand-off arrives: the windowed parts of the last blocks only."""
    tokens = sequence.tokens.tolist()
    first = memory.layout.first_block(len(tokens))
    for place in range(cached // SIZE, len(sequence.blocks)):
        stored = tokens[: min(len(tokens), (place + 1) * SIZE)]
        memory.held[sequence.blocks[place], False] = stored
        if place >= first:
            assert place in sequence.window
            memory.held[sequence.blocks[place], True] = stored
    sequence.advance(memory.cache, len(tokens) - cached)


def test_prompts_that_are_handed_over_share_a_prefix_without_its_window() -> None:
    """A prefix that diverges in the middle: its end never had windowed parts here."""
    memory = Memory((0, 8), 400)
    cache, stem = memory.cache, list(range(40))
    held = []
    for number in range(3):
        one = a_sequence(memory, [*stem, *[50 + number] * 20], "a")
        one.take_prefix(cache, receives=True)
        cached = one.num_computed
        assert cached == (40 if number else 0)
        one.take_blocks(cache, 60, 60)
        receive(memory, one, cached)
        held.append(one)
    here = a_sequence(memory, [*stem, 60], "a")
    here.take_prefix(cache)
    assert here.num_computed == 0, "what is computed here needs the window"
    assert held[1].blocks[:10] == held[0].blocks[:10]
    for one in held:
        one.drop_blocks(cache)
    memory.check()


def test_a_prefix_is_found_where_its_window_is() -> None:
    """The windowed parts of the blocks behind the window are kept while nothing needs their
    memory.
    """
    memory = Memory((0, 8), 400)
    cache = memory.cache
    tokens = list(range(40))
    first = a_sequence(memory, tokens, "a")
    first.take_blocks(cache, 40)
    while first.uncomputed:
        memory.write(first, min(CHUNK, first.uncomputed))
        first.advance(cache, min(CHUNK, first.uncomputed))
    assert list(first.window) == list(range(8, 10)), "the last 8 of 40 tokens, and the next"
    branch = a_sequence(memory, [*tokens[:20], 99], "a")
    branch.take_prefix(cache)
    assert branch.num_computed == 20, "in the middle of the first"
    branch.drop_blocks(cache)
    # Something takes all the memory but that which is held.
    pool = cache.pool
    others = pool.allocate(pool.units_available // pool.units.unwindowed)
    again = a_sequence(memory, [*tokens[:20], 99], "a")
    again.take_prefix(cache)
    assert again.num_computed == 0, "the parts behind the window have made room"
    whole = a_sequence(memory, [*tokens, 99], "a")
    whole.take_prefix(cache)
    assert whole.num_computed == 40, "those of the end are held"
    whole.drop_blocks(cache)
    cache.release(others)
    first.drop_blocks(cache)
    memory.check()


def test_a_block_that_is_computed_again_takes_the_name_of_one_without_its_window() -> None:
    memory = Memory((0, 8), 60)
    cache, tokens = memory.cache, list(range(24))
    first = a_sequence(memory, tokens, "a")
    compute(memory, first)
    pool = cache.pool
    spare = pool.allocate(pool.units_available // pool.units.unwindowed)
    cache.release(spare)
    branch = a_sequence(memory, [*tokens[:12], 77], "a")
    compute(memory, branch)
    assert branch.cached_tokens == 0
    branch.drop_blocks(cache)
    again = a_sequence(memory, [*tokens[:12], 78], "a")
    again.take_prefix(cache)
    assert again.num_computed == 12, "its blocks have their windowed parts"
    again.drop_blocks(cache)
    memory.check()
    # What follows the renamed blocks is found as before.
    more = a_sequence(memory, [*tokens, 79], "a")
    more.take_prefix(cache)
    assert more.num_computed == 24
    more.drop_blocks(cache)
    first.drop_blocks(cache)
    memory.check()


def compute(memory: Memory, sequence: Sequence) -> None:
    sequence.take_prefix(memory.cache)
    sequence.take_blocks(memory.cache, len(sequence.tokens))
    while sequence.uncomputed:
        count = min(CHUNK, sequence.uncomputed)
        memory.write(sequence, count)
        sequence.advance(memory.cache, count)


def test_without_windows_a_unit_is_a_block() -> None:
    plain = KvLayout((LayerKv(1, 8, 8),) * 2, SIZE, "float32")
    assert BlockUnits.of(plain) == BlockUnits(1, 0)
    pool = BlockPool(5)
    pool.allocate(2)
    assert (pool.capacity, pool.units_held, pool.units_available) == (5, 2, 3)
    assert pool.counts == (5, 2, 0)


@pytest.mark.parametrize(
    ("windows", "units"),
    [((0, 6), (1, 1)), ((0, 6, 6, 6), (1, 3)), ((6, 6), (1, 16)), ((0, 0, 6), (2, 1))],
)
def test_units_are_in_the_ratio_of_the_layers(
    windows: tuple[int, ...], units: tuple[int, int]
) -> None:
    assert BlockUnits.of(layout(*windows)) == BlockUnits(*units)


def test_present_parts_are_held_before_others_take_memory() -> None:
    """Otherwise a new part could take the memory of one that is about to be held."""
    pool = BlockPool(4, BlockUnits(1, 1), capacity=4)
    old, new, cached = pool.allocate(3)
    pool.hold_windows([old])
    pool.name(old, b"1", 1)
    pool.name(cached, b"2", 2)
    pool.release_windows([old])
    pool.release([cached])
    pool.hold_windows([new, old])
    assert pool.has_window(old)
    assert pool.lookup(b"2", 2) is None, "it made room"
    pool.check_integrity()


def test_wrong_holds_of_windowed_parts_are_found() -> None:
    pool = BlockPool(4, BlockUnits(1, 1), capacity=8)
    (block,) = pool.allocate(1)
    pool.hold_windows([block])
    with pytest.raises(IntegrityError, match="released before its windowed part"):
        pool.release([block])
    pool = BlockPool(4, BlockUnits(1, 1), capacity=8)
    (block,) = pool.allocate(1)
    with pytest.raises(IntegrityError, match=f"windowed part of block {block} is not held"):
        pool.release_windows([block])
    with pytest.raises(IntegrityError, match="held before the block"):
        pool.hold_windows([block + 1])
    pool.name(block, b"1", 1)
    with pytest.raises(IntegrityError, match=f"named block {block} is absent"):
        pool.hold_windows([block])
