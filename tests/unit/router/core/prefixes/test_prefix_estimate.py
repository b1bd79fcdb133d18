from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.prefixes.prefix_estimate import PrefixEstimate


def test_leading_blocks_only() -> None:
    index = PrefixEstimate()
    index.add("a", [1, 2, 3], 10)
    assert index.match("a", [1, 2, 9]) == 2
    assert index.match("a", [9, 2, 3]) == 0
    assert index.match("a", [1, 2, 3, 4]) == 3
    assert index.match("b", [1]) == 0


def test_a_lost_worker_holds_nothing() -> None:
    index = PrefixEstimate()
    index.add("a", [1], 10)
    index.drop("a")
    index.drop("never seen")
    assert index.match("a", [1]) == 0


def test_least_recently_assigned_is_forgotten_first_and_tails_before_heads() -> None:
    index = PrefixEstimate()
    index.add("a", [1, 2], 4)
    index.add("a", [3, 4], 4)
    index.add("a", [1, 2], 4)
    index.add("a", [5], 4)
    assert index.match("a", [1, 2]) == 2
    assert index.match("a", [3, 4]) == 1


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6, unique=True), max_size=20), st.integers(1, 8)
)
def test_never_claims_what_was_not_assigned(sequences: list[list[int]], capacity: int) -> None:
    index = PrefixEstimate()
    seen: set[int] = set()
    for hashes in sequences:
        index.add("a", hashes, capacity)
        seen |= set(hashes)
        matched = index.match("a", hashes)
        assert matched <= capacity
        assert set(hashes[:matched]) <= seen
        assert matched == min(len(hashes), capacity)
