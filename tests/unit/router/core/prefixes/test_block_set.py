from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.prefixes.block_set import BlockSet, ClusteredKeys

# Few slots, the last ones among them, so that searches are long and go round the table's end. 0
# looks like an empty slot.
SLOTS = st.sampled_from([0, 1, 2, 253, 254, 255])
KEYS = st.builds(lambda high, slot: high << 32 | slot, st.integers(0, 30), SLOTS)


def leading(keys: Iterable[int], held: set[int]) -> int:
    """The naive answer."""
    count = 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count


class Sets(RuleBasedStateMachine):
    """A BlockSet beside a set of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.set, self.model = BlockSet(), set[int]()

    @rule(keys=st.lists(KEYS, max_size=60))
    def add(self, keys: list[int]) -> None:
        self.set.add(keys)
        self.model |= set(keys)

    @rule(keys=st.lists(KEYS, max_size=40))
    def remove(self, keys: list[int]) -> None:
        self.set.remove(keys)
        self.model -= set(keys)

    @rule(count=st.integers(0, 2000))
    def reserve(self, count: int) -> None:
        self.set.reserve(count)

    @rule(more=st.lists(KEYS, max_size=5), data=st.randoms(use_true_random=False))
    def match(self, more: list[int], data: random.Random) -> None:
        held = sorted(self.model)
        data.shuffle(held)
        keys = held[: data.randrange(len(held) + 1)] + more + held
        assert self.set.match(np.array(keys, np.uint64)) == leading(keys, self.model)

    @invariant()
    def has_the_same_keys(self) -> None:
        assert set(self.set) == self.model
        assert len(self.set) == len(self.model)
        checksum = 0
        for key in self.model:
            checksum ^= key
        assert self.set.checksum == checksum


TestSets = Sets.TestCase
TestSets.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class Counted:
    """Slots of a table that count how often they are read."""

    def __init__(self, slots: memoryview) -> None:
        self._slots = slots
        self.reads = 0

    def __getitem__(self, slot: int) -> int:
        self.reads += 1
        return self._slots[slot]


@pytest.fixture(scope="module")
def million() -> BlockSet:
    made, rng = BlockSet(), np.random.default_rng(1)
    made.reserve(10**6)
    keys = rng.integers(1, 2**64, 10**6, np.uint64, endpoint=False)
    for start in range(0, len(keys), 8192):
        made.add(keys[start : start + 8192].tolist())
    assert len(made) == 10**6
    return made


def test_a_million_blocks_take_less_than_64_bytes_each(million: BlockSet) -> None:
    assert million.num_bytes < 64 * 10**6
    tracemalloc.start()
    try:
        copy = BlockSet()
        copy.reserve(10**6)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert copy.num_bytes <= taken < 64 * 10**6


def test_a_table_that_grows_by_itself_takes_less_than_64_bytes_a_key() -> None:
    made, rng = BlockSet(), random.Random(2)
    for size in range(1000, 20_001, 1000):
        made.add(rng.getrandbits(64) for _ in range(1000))
        assert made.num_bytes <= 32 * size + 2048


def test_lookups_do_not_depend_on_the_size_of_the_index(million: BlockSet) -> None:
    """The mean search reads as many slots among a million keys as among a thousand, so a lookup
    grows with the prompt alone.
    """
    small, rng = BlockSet(), random.Random(3)
    small.reserve(1000)
    small.add(rng.getrandbits(64) for _ in range(1000))
    means = []
    for made in (small, million):
        keys = list(made)[:1000]
        counted = Counted(made._slots)
        slots, made._slots = made._slots, counted  # type: ignore[assignment]
        assert all(key in made for key in keys)
        made._slots = slots
        means.append(counted.reads / len(keys))
    assert max(means) < 6, "two reads a look, and less than two looks a key when half full"


@given(st.integers(0, 3000), st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_a_lookup_ends_at_the_first_missing_block(held: int, more: int) -> None:
    rng = random.Random(4)
    keys = [rng.getrandbits(64) for _ in range(held + more)]
    made = BlockSet()
    made.add(keys[:held])
    made.add(keys[held + 1 :])
    assert made.match(np.array(keys, np.uint64)) == held


def test_keys_that_somebody_has_chosen_are_refused() -> None:
    made = BlockSet()

    def chosen() -> Iterator[int]:
        for number in range(1, 10_000):
            yield number << 32 | 7

    with pytest.raises(ClusteredKeys, match="steps"):
        made.add(chosen())
    assert len(made) < 1000
