"""The results of a sweep of simulations, and the points that no other point beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.loadtest.report.statistics import Summary
from kvrelay.loadtest.report.sweep_report import Report

FORMAT = "kvrelay-simulation-sweep-1"


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
    """Returns the points that no other point beats: with at least as much goodput at a lower cost,
    or more goodput at the same cost. Ascending by cost.
    """
    found: list[SweepPoint] = []
    for one in sorted(points, key=lambda point: (point.cost, -point.goodput)):
        last = found[-1] if found else None
        equal = last is not None and (one.cost, one.goodput) == (last.cost, last.goodput)
        if last is None or equal or one.goodput > last.goodput:
            found.append(one)
    return tuple(found)


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
