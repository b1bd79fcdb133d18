"""The results of a sweep of simulations, and the points that no other point beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from kvrelay.loadtest.report.statistics import Summary
from kvrelay.loadtest.report.sweep_report import Report

FORMAT = "kvrelay-simulation-sweep-1"
# Significant digits of the compared figures.
DIGITS = 3


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The figures of one simulation of a sweep."""

    name: str
    values: tuple[tuple[str, str], ...]
    # Requests per second that met every objective; all answered requests without objectives.
    goodput: float
    # Mean number of workers.
    cost: float
    good_share: float
    # Share of the prompt tokens that came from a prefix cache.
    cached_share: float
    requests: int
    failed: int
    latencies: dict[str, Summary | None]

    @classmethod
    def of(cls, name: str, values: tuple[tuple[str, str], ...], report: Report) -> SweepPoint:
        """Takes the figures from a report of a simulation."""
        rates = report.rates()
        seconds = report.options["simulated_seconds"]
        latencies = report.latencies()
        prompts = sum(row.prompt_tokens for row in report.answered)
        cached = sum(row.cached_tokens for row in report.answered)
        return cls(
            name=name,
            values=values,
            goodput=rates.get("goodput requests", rates["requests"]),
            cost=report.options["worker_seconds"] / seconds if seconds else 0.0,
            good_share=report.good_share,
            cached_share=cached / prompts if prompts else 0.0,
            requests=len(report.rows) * report.row_every,
            failed=sum(report.errors.values()) * report.row_every,
            latencies={key: latencies[key] for key in ("TTFT", "TPOT", "ITL", "E2E")},
        )


def pareto(points: Sequence[SweepPoint]) -> tuple[SweepPoint, ...]:
    """Returns the points that no other point beats, ascending by cost. A point beats another with
    at least as much goodput at no higher cost if one of the two is better. If both are equal, it
    beats another with no higher p99 of TTFT and ITL if one of these is lower.

    Figures are compared as they are shown: smaller differences come from the ends of a run.
    """
    found: list[SweepPoint] = []
    most = -math.inf
    for (_, negative), group in groupby(sorted(points, key=_place), _place):
        if -negative > most:
            most = -negative
            equal = [(one, _p99(one)) for one in group]
            found += [
                one for one, own in equal if not any(_lower(other, own) for _, other in equal)
            ]
    return tuple(found)


def _place(point: SweepPoint) -> tuple[float, float]:
    return _shown(point.cost), -_shown(point.goodput)


def _p99(point: SweepPoint) -> tuple[float, ...]:
    """Returns the p99 of TTFT and ITL; infinite without a sample."""
    found = (point.latencies.get(name) for name in ("TTFT", "ITL"))
    return tuple(math.inf if one is None else _shown(one.p99) for one in found)


def _lower(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= its for mine, its in zip(one, other, strict=True))


def _shown(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def sweep_to_json(points: Sequence[SweepPoint], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the sweep as plain data for JSON."""
    best = {one.name for one in pareto(points)}
    return {
        "format": FORMAT,
        "options": options,
        "points": [
            {**asdict(one), "values": dict(one.values), "pareto": one.name in best}
            for one in points
        ],
    }
