"""Formats sweeps of simulations for the terminal, and shows their progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from kvrelay.simulation.sweep import SweepPoint, pareto

# Columns of the table with one line per point; names are longer in some sweeps.
_WIDE = 120


def sweep_view(points: Sequence[SweepPoint], width: int) -> RenderableType:
    """Returns a table of the points in `width` columns: a line for each, or a paragraph in few.
    Points that no other point beats have a mark. Latencies are in milliseconds.
    """
    best = {one.name for one in pareto(points)}
    meaning = (
        "Pareto: no other point has more goodput at the same or a lower cost, or as much at the "
        "same cost with a lower p99 of TTFT and ITL; to three digits."
    )
    if width < _WIDE:
        return Group(*(_paragraph(one, one.name in best) for one in points), meaning)
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
    return Group(table, meaning)


def _paragraph(point: SweepPoint, is_best: bool) -> Text:
    text = Text(point.name, style="bold")
    text.append(" (Pareto)" if is_best else "", style="not bold")
    latencies = ", ".join(
        f"{name} {_ms(point, name, 'median')} and {_ms(point, name, 'p99')}"
        for name in ("TTFT", "ITL")
    )
    text.append(
        f"\n  {point.goodput:.2f} requests/s within SLOs ({point.good_share:.0%}), "
        f"{point.cost:.2f} workers, {point.cached_share:.1%} cached, {point.failed} failed"
        f"\n  ms at p50 and p99: {latencies}",
        style="not bold",
    )
    return text


def _ms(point: SweepPoint, name: str, column: str) -> str:
    summary = point.latencies[name]
    return "-" if summary is None else f"{1000 * getattr(summary, column):.1f}"


@contextmanager
def simulation_progress(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal. Yields a function that takes the number of requests that
    have ended.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task(text, total=total)

        def done(ended: int) -> None:
            if ended % 64 == 0:
                progress.update(bar, completed=ended)

        yield done
