"""Percentiles by nearest rank, the definition for all figures of kvrelay."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns the smallest value of the sample that at least `percent` of the values do not exceed.

    - ordered: the sample, ascending and not empty.
    - percent: 0 to 100. 0 is the smallest value, 100 the largest.

    Source: nearest rank, Hyndman and Fan's type 1, "Sample Quantiles in Statistical Packages"
    (1996).
    """
    # The product is exact for whole percents, so a whole rank does not round up.
    rank = math.ceil(percent * len(ordered) / 100)
    return ordered[max(0, rank - 1)]
