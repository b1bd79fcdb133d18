"""The client's measurements over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.percentiles import percentile

MAX_BINS = 120
_LEAST_BIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Binned:
    """Values for equal parts of a test, beginning at its start."""

    bin_s: float
    # Requests due, per second.
    arrivals: tuple[float, ...]
    # p95 of the gaps that ended in each part; None for a part without gaps.
    itl_p95_ms: tuple[float | None, ...]


def binned(report: Report) -> Binned:
    """Divides the test into at most MAX_BINS parts and computes the values of each."""
    span = max([report.duration_s, *(row.scheduled_s for row in report.rows)], default=0.0)
    bin_s = max(_LEAST_BIN_S, span / MAX_BINS)
    bins = max(1, math.ceil(span / bin_s - 1e-9))

    def place(at: float) -> int:
        return min(bins - 1, int(at / bin_s))

    due = [0] * bins
    for row in report.rows:
        due[place(row.scheduled_s)] += 1
    gaps: list[list[float]] = [[] for _ in range(bins)]
    for at, gap in token_gaps(report.answered):
        gaps[place(at)].append(gap)
    itl = tuple(1000 * percentile(sorted(one), 95) if one else None for one in gaps)
    return Binned(bin_s, tuple(count / bin_s for count in due), itl)


def first_tokens(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Returns (time, seconds since the request was due) of each first token."""
    return [(row.scheduled_s + row.ttft_s, row.ttft_s) for row in rows if row.ttft_s is not None]


def token_gaps(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Returns (end time, seconds) of each gap between two tokens of an answer."""
    found: list[tuple[float, float]] = []
    for row in rows:
        if row.ttft_s is not None:
            times = accumulate(row.itl_s, initial=row.scheduled_s + row.ttft_s)
            found += zip(list(times)[1:], row.itl_s, strict=True)
    return found
