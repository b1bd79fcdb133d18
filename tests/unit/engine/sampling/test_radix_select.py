from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrelay.engine.sampling.radix_select import last_kept


@st.composite
def tables(
    draw: st.DrawFn,
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]:
    """Keys, values and targets. The values are whole numbers, so their sums are exact."""
    num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    keys = []
    for _ in range(num_rows):
        least = draw(st.integers(0, 2**62))
        spread = draw(st.sampled_from((64, 2**11, 2**33, 2**62)))
        row = st.lists(st.integers(0, spread - 1), min_size=width, max_size=width, unique=True)
        keys.append([least + key for key in draw(row)])
    counts = st.lists(st.integers(0, 5), min_size=width, max_size=width).filter(any)
    values = [draw(counts) for _ in range(num_rows)]
    targets = [draw(st.floats(0.25, 1.25 * sum(row)) | st.just(float("inf"))) for row in values]
    return np.array(keys, np.int64), np.array(values, np.float32), np.array(targets, np.float64)


def by_sort(keys: list[int], values: list[float], target: float) -> int:
    total = 0.0
    last = -1
    for key, value in sorted(zip(keys, values, strict=True), reverse=True):
        if value:
            total, last = total + value, key
        if total >= target:
            break
    return last


@given(tables())
def test_selects_what_a_sort_finds(
    table: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]],
) -> None:
    keys, values, targets = table
    before = keys.copy(), values.copy(), targets.copy()
    expected = [
        by_sort(list(row), list(weights), target)
        for row, weights, target in zip(keys.tolist(), values.tolist(), targets, strict=True)
    ]
    assert last_kept(keys, values, targets).tolist() == expected
    assert all(map(np.array_equal, before, (keys, values, targets)))
