"""Latency samples as curves: cumulative distributions, and histograms with bins shared by several
runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvrelay.percentiles import percentile

BINS = 48
# Points of the cumulative curve.
_STEPS = 200
# Ratio of p99 to median above which the axis is logarithmic.
_LONG_TAIL = 12.0
Json = dict[str, Any]


def distribution(samples: Sequence[Sequence[float]]) -> Json | None:
    """samples: for each run, values in seconds. Returns the curves in milliseconds, or None if no
    run has values.

    The axis ends slightly above the highest p99; `beyond` counts the values outside.
    """
    runs = [sorted(value * 1000 for value in sample) for sample in samples]
    filled = [run for run in runs if run]
    if not filled:
        return None
    p99 = max(percentile(run, 99) for run in filled)
    logarithmic = p99 > _LONG_TAIL * max(percentile(run, 50) for run in filled) > 0
    # Differences of times in a damaged report may be negative.
    high = 1.15 * p99 if p99 > 0 else 1.0
    low = max(high / 1e5, 0.9 * min(percentile(run, 0.5) for run in filled)) if logarithmic else 0.0
    return {
        "log": logarithmic,
        "low": low,
        "high": high,
        "runs": [
            {
                "n": len(run),
                "cdf": [percentile(run, 100 * step / _STEPS) for step in range(_STEPS + 1)]
                if run
                else [],
                "bins": _bins(run, low, high, logarithmic),
                "beyond": sum(value >= high for value in run),
            }
            for run in runs
        ],
    }


def _bins(run: Sequence[float], low: float, high: float, logarithmic: bool) -> list[int]:
    counts = [0] * BINS
    for value in run:
        if value < high:
            share = (
                math.log(max(value, low) / low) / math.log(high / low)
                if logarithmic
                else value / high
            )
            counts[min(BINS - 1, max(0, int(share * BINS)))] += 1
    return counts
