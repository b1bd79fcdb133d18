from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.block_keys import pack_keys, unpack_keys
from kvrelay.worker_messages import CacheUpdate
from router.core.prefixes import cache_replica
from router.core.prefixes.cache_replica import RESYNC_S, CacheReplica


def packed(*keys: int) -> bytes:
    return pack_keys(key.to_bytes(8, "little") for key in keys)


def update(number: int, *held: int, **fields: object) -> CacheUpdate:
    """An update after which the worker holds these keys."""
    told = CacheUpdate(number, blocks=len(held), checksum=reduce(xor, held, 0))
    return replace(told, **fields)  # type: ignore[arg-type]


def snapshot(number: int, *held: int) -> CacheUpdate:
    return update(number, *held, begins=True, stored=packed(*held))


def test_a_snapshot_and_then_changes() -> None:
    made = CacheReplica()
    assert not made.exact
    assert not made.apply(snapshot(1, 5, 6), 0.0)
    assert made.exact
    assert not made.apply(update(2, 6, 7, stored=packed(7), removed=packed(5)), 0.1)
    assert made.exact
    assert made.keys == {6, 7}
    assert (made.snapshots, made.gaps) == (1, 0)


def test_a_snapshot_in_parts_is_exact_after_the_last() -> None:
    made = CacheReplica()
    parts = [
        update(1, 1, 2, 3, begins=True, complete=False, stored=packed(1)),
        update(2, 1, 2, 3, complete=False, stored=packed(2)),
        update(3, 1, 2, 3, stored=packed(3)),
    ]
    for part in parts:
        assert not made.exact
        assert not made.apply(part, 0.0)
    assert made.exact
    assert made.keys == {1, 2, 3}


def test_a_gap_asks_for_a_snapshot_and_keeps_what_is_known_until_it_comes() -> None:
    made = CacheReplica()
    made.apply(snapshot(1, 5), 0.0)
    assert made.apply(update(3, 5, 7, stored=packed(7)), 1.0)
    assert made.keys == {5}
    assert not made.exact
    assert made.gaps == 1
    assert not made.apply(update(4, 7, removed=packed(5)), 1.1), "it is on its way"
    assert not made.apply(snapshot(5, 7), 1.2)
    assert made.exact
    assert made.keys == {7}


def test_a_lost_wish_is_repeated_and_each_time_later() -> None:
    made = CacheReplica()
    made.apply(snapshot(1, 5), 0.0)
    asked, number = [], 3
    for tick in range(2000):
        if made.apply(update(number, 5), tick / 10):
            asked.append(tick / 10)
        number += 1
    pauses = [round(later - earlier, 3) for earlier, later in pairwise(asked)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0][: len(pauses)]
    assert len(pauses) >= 8
    assert max(pauses) == RESYNC_S[1]


def test_what_comes_twice_or_late_is_ignored() -> None:
    made = CacheReplica()
    first = snapshot(1, 5)
    made.apply(first, 0.0)
    made.apply(update(2, removed=packed(5)), 0.1)
    assert not made.apply(first, 0.2)
    assert not made.apply(update(2, 5, stored=packed(5)), 0.3)
    assert made.keys == set()
    assert made.exact


@pytest.mark.parametrize("wrong", [{"blocks": 2}, {"checksum": 9}])
def test_another_count_or_checksum_asks_for_a_snapshot(wrong: dict[str, int]) -> None:
    made = CacheReplica()
    made.apply(snapshot(1, 5), 0.0)
    assert made.apply(update(2, 5, **wrong), 0.1)
    assert not made.exact


def test_blocks_of_an_unknown_tier_are_ignored_and_their_numbers_are_not() -> None:
    made = CacheReplica()
    made.apply(snapshot(1, 5), 0.0)
    assert not made.apply(update(2, 8, 9, tier=4, begins=True, stored=packed(8, 9)), 0.1)
    assert made.keys == {5}
    assert not made.apply(update(3, 5, 6, stored=packed(6)), 0.2)
    assert made.exact
    assert made.apply(update(5, 8, tier=4, begins=True, stored=packed(8)), 0.3), "4 is lost"


def test_chosen_keys_and_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CacheReplica()
    clustered = [number << 32 | 7 for number in range(1, 2000)]
    assert made.apply(snapshot(1, *clustered), 0.0)
    assert len(made) == 0
    monkeypatch.setattr(cache_replica, "MOST_BLOCKS", 3)
    made = CacheReplica()
    assert made.apply(snapshot(1, 1, 2, 3, 4), 0.0)
    assert len(made) == 0
    assert not made.exact


@given(
    st.lists(
        st.builds(
            CacheUpdate,
            number=st.integers(-3, 8),
            begins=st.booleans(),
            complete=st.booleans(),
            tier=st.integers(-1, 2),
            stored=st.lists(st.integers(0, 9)).map(lambda keys: packed(*keys)),
            removed=st.lists(st.integers(0, 9)).map(lambda keys: packed(*keys)),
            blocks=st.integers(-(2**63), 2**63 - 1),
            checksum=st.integers(0, 2**64 - 1),
        ),
        max_size=12,
    )
)
def test_any_updates_are_survived(updates: list[CacheUpdate]) -> None:
    """And only what was told is believed."""
    made, told = CacheReplica(), set[int]()
    for number, one in enumerate(updates):
        made.apply(replace(one, blocks=min(one.blocks, 10**4)), float(number))
        told |= set(unpack_keys(one.stored))
        assert made.keys <= told
