"""Goodput against rate: how fast requests may come while enough of them meet their objectives."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.loadtest.report.sweep_report import Report

Offer = Callable[[float], Awaitable[Report]]  # a run at a rate
# Of the largest objective, that arrivals should last: in a shorter run a queue that grows misses
# nothing yet.
_LASTING = 10


@dataclass(frozen=True, slots=True)
class Sweep:
    attainment: float  # share of the requests that must meet every objective
    runs: tuple[tuple[float, Report], ...]  # by rate, ascending

    def good(self, report: Report) -> bool:
        """An interrupted run never is: its slowest requests have no row."""
        return not report.interrupted and report.good_share >= self.attainment

    @property
    def best_rate(self) -> float | None:
        """The highest rate that was good enough; None if none was."""
        return max((rate for rate, report in self.runs if self.good(report)), default=None)

    @property
    def dead(self) -> tuple[tuple[float, Report], ...]:
        """Runs in which nothing was answered, though nobody interrupted them. One ends the
        sweep.
        """
        return tuple(
            (rate, report)
            for rate, report in self.runs
            if not (report.answered or report.interrupted)
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the runs, and of runs that were too short."""
        return tuple(
            f"at {rate:.4g}/s: {one}"
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
        f"requests came for {lasted:.3g} s, less than {_LASTING} times the largest objective of "
        f"{longest:g} s: a queue that grows may not show yet. Give a --duration of at least "
        f"{_LASTING * longest:g}",
    )


def _over(report: Report) -> bool:
    """Whether a sweep ends with this run."""
    return report.interrupted or not report.answered


async def try_rates(offer: Offer, rates: Sequence[float], attainment: float) -> Sweep:
    """Each of them, in ascending order. A run that is interrupted, or gets no answer at all, ends
    the sweep.
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
    """Looks for the highest good rate from `low` to `high`, until it is known to a factor of 1 +
    precision.

    Halves the interval by ratio; so it supposes that a lower rate is never worse. Both ends are
    tried first: if the low one is not good or the high one is, nothing lies between. A run that is
    interrupted, or gets no answer at all, ends the search.
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
        if await good(middle):
            low = middle
        else:
            high = middle
    return sweep
