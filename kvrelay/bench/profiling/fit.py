"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Fit:
    """The coefficients of a fit, and its relative errors: root mean square, and largest."""

    coefficients: tuple[float, ...]
    rms: float
    most: float


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], what: str) -> Fit:
    """Returns the coefficients, 0 or more, that minimise the sum of the squared relative errors of
    rows x coefficients against the seconds.

    Every subset of the coefficients is tried with the others 0, which is exact: the minimum under
    the bounds is the free minimum of one of the subsets. Raises FailedPrecondition if the
    measurements do not determine the coefficients and their error.
    """
    x, y = np.array(rows, float), np.array(seconds, float)
    scaled = x / np.maximum(np.abs(x).max(axis=0, initial=0.0), 1e-300)
    # As many measurements as coefficients are met exactly, whatever they are: the error of such a
    # fit would be 0 and tell nothing.
    few = len(y) <= x.shape[-1]
    if few or not np.all(y > 0) or np.linalg.matrix_rank(scaled) < x.shape[-1]:
        raise FailedPrecondition(
            f"{what}: {len(y)} measurements do not determine {x.shape[-1]} coefficients; give more "
            "time or a model with a longer context"
        )
    relative = x / y[:, None]
    best = np.zeros(x.shape[-1])
    error = float(len(y))
    for size in range(1, x.shape[-1] + 1):
        for chosen in itertools.combinations(range(x.shape[-1]), size):
            part = relative[:, chosen]
            scale = np.abs(part).max(axis=0)
            scale[scale == 0] = 1.0
            found = np.linalg.lstsq(part / scale, np.ones(len(y)), rcond=None)[0] / scale
            if np.any(found < 0):
                continue
            squares = float(((part @ found - 1) ** 2).sum())
            if squares < error - 1e-12:
                error = squares
                best = np.zeros(x.shape[-1])
                best[list(chosen)] = found
    errors = np.abs(relative @ best - 1)
    rms = float(np.sqrt((errors**2).mean()))
    return Fit(tuple(map(float, best)), rms, float(errors.max()))
