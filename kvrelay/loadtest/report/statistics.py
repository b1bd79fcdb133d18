"""Summary statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.percentiles import percentile


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a sample, in the unit of the sample. The median and the percentiles are values
    of the sample (nearest rank). `std` is the population standard deviation (divides by n).
    """

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float


def summarize(values: Sequence[float]) -> Summary | None:
    """Computes the statistics of a sample. Returns None for an empty sample."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Summary(
        mean=mean,
        median=percentile(ordered, 50),
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )
