"""Coefficients of step costs from measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.least_squares import nonnegative_least_squares


@dataclass(frozen=True, slots=True)
class Fit:
    """The coefficients of a fit, and its relative errors: root mean square, and largest."""

    coefficients: tuple[float, ...]
    rms: float
    most: float


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], what: str) -> Fit:
    """Returns the coefficients, 0 or more, that minimise the sum of the squared relative errors of
    rows x coefficients against the seconds. Raises FailedPrecondition if the measurements do not
    determine the coefficients and their error.
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
    best = nonnegative_least_squares(relative, np.ones(len(y)))
    errors = np.abs(relative @ best - 1)
    rms = float(np.sqrt((errors**2).mean()))
    return Fit(tuple(map(float, best)), rms, float(errors.max()))
