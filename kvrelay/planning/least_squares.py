"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Another subset of the coefficients is better if it lowers the squared errors by more than this
# share of them, plus this share of the squared values.
_BETTER = 1e-6
_EXACT = 1e-12


def nonnegative_least_squares(
    columns: Floats, values: Floats, positive: Sequence[int] = ()
) -> Floats:
    """Returns the coefficients, 0 or more, that minimise the sum of the squared errors of columns x
    coefficients against the values. A column that explains nothing gets 0.

    Every subset of the coefficients is tried with the others 0, which is exact: the minimum under
    the bounds is the free minimum of one of the subsets.

    - columns: measurements x coefficients.
    - values: one per measurement.
    - positive: columns whose coefficient is above 0. If no such coefficients are found, all are 0.
    """
    count = columns.shape[-1]
    total = float((values**2).sum())
    best, error = np.zeros(count), np.inf if positive else total
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            if not set(positive) <= set(chosen):
                continue
            part = columns[:, chosen]
            scale = np.abs(part).max(axis=0)
            scale[scale == 0] = 1.0
            found = np.linalg.lstsq(part / scale, values, rcond=None)[0] / scale
            coefficients = np.zeros(count)
            coefficients[list(chosen)] = found
            if np.any(found < 0) or np.any(coefficients[list(positive)] <= 0):
                continue
            squares = float(((part @ found - values) ** 2).sum())
            if squares < error * (1 - _BETTER) - _EXACT * total:
                best, error = coefficients, squares
    return best
