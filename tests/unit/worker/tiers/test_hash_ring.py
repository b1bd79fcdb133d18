"""Which store keeps a block: all workers agree, and little changes when a store comes or goes."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.tiers.hash_ring import HashRing

names = st.lists(
    st.builds("127.0.0.1:{}".format, st.integers(1, 65535)), min_size=1, max_size=8, unique=True
)
keys = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40, unique=True)


@given(names, keys, st.randoms())
def test_all_workers_agree_whatever_the_order_of_the_names(
    stores: list[str], blocks: list[bytes], rng: random.Random
) -> None:
    shuffled = list(stores)
    rng.shuffle(shuffled)
    one, other = HashRing(stores), HashRing(shuffled)
    for block in blocks:
        assert one.place(block) == other.place(block)
        assert one.place(block) in stores


@given(names.filter(lambda one: len(one) > 1), keys, st.data())
def test_a_store_that_leaves_loses_its_blocks_only(
    stores: list[str], blocks: list[bytes], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(stores))
    before, after = HashRing(stores), HashRing([one for one in stores if one != lost])
    for block in blocks:
        if before.place(block) != lost:
            assert after.place(block) == before.place(block)
        # A store that is skipped is one that is not there.
        assert before.place(block, lambda one: one != lost) == after.place(block)


@given(names, keys)
def test_nothing_is_placed_where_nothing_works(stores: list[str], blocks: list[bytes]) -> None:
    ring = HashRing(stores)
    for block in blocks:
        asked: list[str] = []
        assert ring.place(block, lambda one: bool(asked.append(one))) is None  # noqa: B023
        # Each store is asked once.
        assert sorted(asked) == sorted(stores)


def test_blocks_spread_evenly_also_those_of_a_lost_store() -> None:
    stores = [f"10.0.0.{number}:50061" for number in range(5)]
    ring, rng = HashRing(stores), random.Random(1)
    blocks = [rng.randbytes(32) for _ in range(20_000)]
    counts = Counter(ring.place(block) for block in blocks)
    assert set(counts) == set(stores)
    assert max(counts.values()) < 1.4 * 4000
    assert min(counts.values()) > 0.6 * 4000
    heirs = Counter(
        ring.place(block, lambda one: one != stores[0])
        for block in blocks
        if ring.place(block) == stores[0]
    )
    assert len(heirs) == 4
    assert max(heirs.values()) < 0.5 * counts[stores[0]]
