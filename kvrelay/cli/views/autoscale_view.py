"""Renders the verdicts of a policy: each change with its reason, and the pools over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.planning.quantity import plain
from kvrelay.types.workers import POOLS

if TYPE_CHECKING:
    from autoscaler.replay import Verdict

_BARS = " ▁▂▃▄▅▆▇█"
# Columns of a plot.
_COLUMNS = 96
# Most rows of the table of changes.
_MOST_CHANGES = 40


def explain_view(verdicts: Sequence[Verdict], note: str) -> RenderableType:
    """Renders plots, a summary of the sizes, and the changes. `note` says where the metrics are
    from.
    """
    pools = {pool: [one for one in verdicts if one.pool == pool] for pool in POOLS}
    parts: list[RenderableType] = [Text(note)]
    for pool, ones in pools.items():
        if ones:
            parts.append(_plot(pool, ones))
    changes = [one for one in verdicts if one.before != one.after]
    parts.append(_summary({pool: ones for pool, ones in pools.items() if ones}))
    parts.append(_changes(changes))
    return Group(*parts)


def _plot(pool: str, verdicts: Sequence[Verdict]) -> RenderableType:
    """Renders one line for the size and one for each metric. Each column shows the largest value of
    its time span.
    """
    table = Table(
        title=f"{pool}, {clock(verdicts[0].at)} to {clock(verdicts[-1].at)}",
        title_justify="left",
        box=None,
    )
    for name in ("", "over time", "largest"):
        table.add_column(name, no_wrap=True, justify="right" if name == "largest" else "left")
    sizes = [one.after for one in verdicts]
    table.add_row("workers", sparkline(sizes), str(max(sizes)))
    for metric in sorted({name for one in verdicts for name in one.seen.metrics}):
        values = [one.seen.metrics.get(metric, math.nan) for one in verdicts]
        known = [value for value in values if math.isfinite(value)]
        table.add_row(metric, sparkline(values), plain(max(known), 4) if known else "-")
    return table


def sparkline(values: Sequence[float], columns: int = _COLUMNS) -> str:
    """Renders bars from 0 to the largest value, and · for unknown values."""
    width = min(columns, len(values))
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    line = []
    for column in range(width):
        part = values[column * len(values) // width : (column + 1) * len(values) // width]
        known = [value for value in part if math.isfinite(value)]
        line.append(
            _BARS[math.ceil(max(known) / top * (len(_BARS) - 1)) if top else 0] if known else "·"
        )
    return "".join(line)


def _summary(pools: dict[str, list[Verdict]]) -> RenderableType:
    table = Table(title="sizes", title_justify="left")
    for name in ("pool", "least", "mean", "most", "changes", "worker-hours"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for pool, ones in pools.items():
        spans = [after.at - before.at for before, after in pairwise(ones)]
        hours = (
            math.fsum(one.after * seconds for one, seconds in zip(ones, spans, strict=False)) / 3600
        )
        total = math.fsum(spans) / 3600
        sizes = [one.after for one in ones]
        mean = hours / total if total else float(sizes[0])
        changed = sum(one.before != one.after for one in ones)
        table.add_row(
            pool, str(min(sizes)), f"{mean:.2f}", str(max(sizes)), str(changed), f"{hours:.2f}"
        )
    return table


def _changes(changes: Sequence[Verdict]) -> RenderableType:
    if not changes:
        return Text("The policy changes no size.")
    table = Table(title="changes", title_justify="left")
    for name in ("at", "pool", "size", "reason"):
        table.add_column(name, no_wrap=name != "reason")
    for one in changes[:_MOST_CHANGES]:
        table.add_row(clock(one.at), one.pool, f"{one.before} → {one.after}", one.reason)
    if len(changes) > _MOST_CHANGES:
        table.add_row("", "", "", f"and {len(changes) - _MOST_CHANGES} more; --json shows all")
    return table


def clock(seconds: float) -> str:
    """Formats seconds as `1d 02:03:04`; the days are left out on the first day."""
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text
