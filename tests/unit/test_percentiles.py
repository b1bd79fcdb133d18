from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.percentiles import percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(sorted)


@given(SAMPLES, st.integers(1, 200))
def test_it_is_the_smallest_value_that_so_many_values_do_not_exceed(
    sample: list[float], half_percents: int
) -> None:
    share = Fraction(half_percents, 200)
    within = [one for one in sample if sum(other <= one for other in sample) >= share * len(sample)]
    assert percentile(sample, half_percents / 2) == min(within)


@given(SAMPLES, st.integers(0, 100), st.integers(0, 100))
def test_it_is_a_value_of_the_sample_and_grows_with_the_percent(
    sample: list[float], one: int, other: int
) -> None:
    low, high = (percentile(sample, percent) for percent in sorted((one, other)))
    assert low in sample
    assert low <= high
    assert (percentile(sample, 0), percentile(sample, 100)) == (sample[0], sample[-1])


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, 2), (19, 19), (20, 19), (21, 20)])
def test_the_95th_percentile_is_the_maximum_only_of_fewer_than_20(size: int, rank: int) -> None:
    assert percentile(range(1, size + 1), 95) == rank
