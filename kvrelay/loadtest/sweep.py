"""Goodput against rate: how fast requests may come while enough of them meet their objectives."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.loadtest.report import Report

Offer = Callable[[float], Awaitable[Report]]  # a run at a rate


@dataclass(frozen=True, slots=True)
class Sweep:
    attainment: float  # share of the requests that must meet every objective
    runs: tuple[tuple[float, Report], ...]  # by rate, ascending

    def good(self, report: Report) -> bool:
        return report.good_share >= self.attainment

    @property
    def best_rate(self) -> float | None:
        """The highest rate that was good enough; None if none was."""
        return max((rate for rate, report in self.runs if self.good(report)), default=None)


async def try_rates(offer: Offer, rates: Sequence[float], attainment: float) -> Sweep:
    """Each of them, in ascending order. An interrupted run ends the sweep."""
    runs = []
    for rate in sorted(rates):
        report = await offer(rate)
        runs.append((rate, report))
        if report.interrupted:
            break
    return Sweep(attainment, tuple(runs))


async def bisect(offer: Offer, low: float, high: float, precision: float, attainment: float) -> Sweep:
    """Looks for the highest good rate from `low` to `high`, until it is known to a factor of 1 + precision.

    Halves the interval by ratio; so it supposes that a lower rate is never worse. Both ends are tried first: if the
    low one is not good or the high one is, nothing lies between. An interrupted run ends the search.
    """
    sweep = Sweep(attainment, ())

    async def good(rate: float) -> bool:
        nonlocal sweep
        report = await offer(rate)
        sweep = Sweep(attainment, tuple(sorted([*sweep.runs, (rate, report)], key=lambda run: run[0])))
        return sweep.good(report)

    def interrupted() -> bool:
        return any(report.interrupted for _, report in sweep.runs)

    if not await good(low) or interrupted() or await good(high):
        return sweep
    while high > low * (1 + precision) and not interrupted():
        middle = math.sqrt(low * high)
        if await good(middle):
            low = middle
        else:
            high = middle
    return sweep
