"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.planning.least_squares import nonnegative_least_squares


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_no_small_change_fits_better(seed: int, count: int) -> None:
    """At the minimum under the bounds, the slope is 0 where a coefficient is above 0, and is not
    negative where it is 0.
    """
    draw = np.random.default_rng(seed)
    columns, values = draw.normal(size=(12, count)), draw.normal(size=12)
    found = nonnegative_least_squares(columns, values)
    assert (found >= 0).all()
    errors = columns @ found - values
    slope = 2 * columns.T @ errors
    assert slope[found > 0] == pytest.approx(0, abs=1e-6)
    # A coefficient that lowers the squares by less than a millionth of them stays 0.
    least = -2e-3 * np.linalg.norm(columns, axis=0) * np.linalg.norm(errors)
    assert (slope >= least - 1e-6).all()
    with_first = nonnegative_least_squares(columns, values, [0])
    if found[0] > 0:
        assert with_first.tolist() == found.tolist()
    else:
        assert with_first[0] > 0 or not with_first.any()


def test_a_column_that_explains_nothing_gets_0() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert nonnegative_least_squares(columns, np.array([1.0, 2.0, 3.0])).tolist() == [2.0, 0.0]
