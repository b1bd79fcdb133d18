"""Measures goodput over the rate: the highest request rate at which enough requests meet their
objectives.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.planning.quantity import plain

# Runs a test at a rate.
Offer = Callable[[float], Awaitable[Report]]
# A run should last this many times the largest objective. In a shorter run, a growing queue does
# not yet miss any objective.
_LASTING = 10


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep."""

    # Share of the requests that must meet every objective.
    attainment: float
    # By rate, ascending.
    runs: tuple[tuple[float, Report], ...]

    def good(self, report: Report) -> bool:
        """Whether a run reached the attainment. An interrupted run never does, because its slowest
        requests have no row.
        """
        return not report.interrupted and report.good_share >= self.attainment

    @property
    def best_rate(self) -> float | None:
        """The highest rate whose run reached the attainment; None if no run did."""
        return max((rate for rate, report in self.runs if self.good(report)), default=None)

    @property
    def dead(self) -> tuple[tuple[float, Report], ...]:
        """Runs without any answer that were not interrupted. Such a run ends the sweep."""
        return tuple(
            (rate, report)
            for rate, report in self.runs
            if not (report.answered or report.interrupted)
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all runs, and warnings about runs that were too short."""
        return tuple(
            f"at {plain(rate, 4)}/s: {one}"
            for rate, report in self.runs
            for one in (*report.warnings, *_short(report))
        )


def _short(report: Report) -> tuple[str, ...]:
    duration = None if report.options.get("num_requests") else report.options.get("duration")
    lasted = duration or max((row.scheduled_s for row in report.rows), default=0.0)
    longest = max((slo.milliseconds for slo in report.slos), default=0.0) / 1000
    if report.interrupted or lasted >= _LASTING * longest:
        return ()
    return (
        f"the run sent requests for {plain(lasted, 3)} s, less than {_LASTING} times the largest "
        f"objective of {plain(longest)} s, so a growing queue may not be visible. Give a "
        f"--duration of at least {_LASTING * longest:g}.",
    )


def _over(report: Report) -> bool:
    """Whether the sweep ends with this run."""
    return report.interrupted or not report.answered


async def try_rates(offer: Offer, rates: Sequence[float], attainment: float) -> Sweep:
    """Runs a test at each rate, in ascending order. A run that is interrupted or gets no answer
    ends the sweep.
    """
    runs = []
    for rate in sorted(rates):
        report = await offer(rate)
        runs.append((rate, report))
        if _over(report):
            break
    return Sweep(attainment, tuple(runs))


async def bisect(
    offer: Offer, low: float, high: float, precision: float, attainment: float
) -> Sweep:
    """Searches for the highest good rate between `low` and `high`, to within a factor of 1 +
    precision.

    The search halves the interval by ratio, so it assumes that a lower rate is never worse. It
    tries both ends first: if `low` is not good or `high` is good, the search ends. A run that is
    interrupted or gets no answer ends the search too.
    """
    sweep = Sweep(attainment, ())

    async def good(rate: float) -> bool:
        nonlocal sweep
        report = await offer(rate)
        sweep = Sweep(
            attainment, tuple(sorted([*sweep.runs, (rate, report)], key=lambda run: run[0]))
        )
        return sweep.good(report)

    def over() -> bool:
        return any(_over(report) for _, report in sweep.runs)

    if not await good(low) or await good(high):
        return sweep
    while high > low * (1 + precision) and not over():
        middle = math.sqrt(low * high)
        if not low < middle < high:
            # There is no rate between them.
            break
        if await good(middle):
            low = middle
        else:
            high = middle
    return sweep
