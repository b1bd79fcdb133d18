"""Formats a sweep of simulations for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.simulation.sweep import SweepPoint, pareto


def sweep_view(points: Sequence[SweepPoint]) -> RenderableType:
    """Returns a table with one line per point; points that no other point beats have a mark.
    Latencies are in milliseconds.
    """
    best = {one.name for one in pareto(points)}
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("point")
    counts = ("workers", "goodput/s", "within SLOs", "cached", "failed")
    for column in (*counts, "TTFT p50", "p99", "ITL p50", "p99"):
        table.add_column(column, justify="right")
    table.add_column("Pareto")
    for one in points:
        table.add_row(
            one.name,
            f"{one.cost:.2f}",
            f"{one.goodput:.2f}",
            f"{one.good_share:.0%}",
            f"{one.cached_share:.1%}",
            str(one.failed),
            *(_ms(one, name, column) for name in ("TTFT", "ITL") for column in ("median", "p99")),
            "yes" if one.name in best else "",
        )
    return Group(table, "Pareto: no other point has more goodput at the same or a lower cost.")


def _ms(point: SweepPoint, name: str, column: str) -> str:
    summary = point.latencies[name]
    return "-" if summary is None else f"{1000 * getattr(summary, column):.1f}"
