"""How far is drafted, by what was accepted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.draft_depth import FIRST_PAUSE, LEAST_LIKELY, LONGEST_PAUSE, DraftDepth

MOST = 8


def verify(depth: DraftDepth, steps: int, likely: float, draw: random.Random) -> list[int]:
    """The depths of so many steps, in which each draft token is right with probability `likely`."""
    depths = []
    for _ in range(steps):
        drafted = depth.depth
        depths.append(drafted)
        right = 0
        while right < drafted and draw.random() < likely:
            right += 1
        depth.learn(drafted, right)
    return depths


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64))))
def test_the_depth_stays_in_its_range_whatever_is_accepted(
    most: int, steps: list[tuple[int, int]]
) -> None:
    depth = DraftDepth(most)
    assert depth.depth == most
    for drafted, accepted in steps:
        depth.learn(drafted, min(drafted, accepted))
        assert 0 <= depth.depth <= most


@given(st.integers(0, 2**32))
def test_a_useless_proposer_is_asked_less_and_less(seed: int) -> None:
    draw = random.Random(seed)
    depth = DraftDepth(MOST)
    depths = verify(depth, 40, 0.0, draw)
    assert sum(depths) < 5 * MOST
    later = verify(depth, 10 * LONGEST_PAUSE, 0.0, draw)
    assert 0 < sum(later) < 20
    assert max(later) == 1


@given(st.integers(0, 2**32))
def test_a_proposer_that_becomes_right_is_used_again(seed: int) -> None:
    draw = random.Random(seed)
    depth = DraftDepth(MOST)
    verify(depth, 3000, 0.0, draw)
    depths = verify(depth, LONGEST_PAUSE + 40, 1.0, draw)
    assert depths[-1] == MOST
    verify(depth, 30, 0.0, draw)
    # The pause is short again.
    assert 1 in verify(depth, 2 * FIRST_PAUSE + 2, 0.0, draw)


@pytest.mark.parametrize(("likely", "least", "most"), [(0.95, 6, 8), (0.7, 2, 5), (0.4, 0, 2)])
def test_the_depth_is_where_a_token_is_still_likely(
    likely: float, least: float, most: float
) -> None:
    depths = verify(DraftDepth(MOST), 2000, likely, random.Random(1))[200:]
    assert least <= sum(depths) / len(depths) <= most


def test_a_depth_counts_the_tokens_that_are_likely_enough() -> None:
    depth = DraftDepth(64)
    share = 1.0
    for _ in range(200):
        wanted = next((k for k in range(64) if share ** (k + 1) < LEAST_LIKELY), 64)
        if wanted == 0:
            break
        assert depth.depth == wanted
        depth.learn(1, 0)
        share *= 7 / 8
    assert depth.depth == 0
