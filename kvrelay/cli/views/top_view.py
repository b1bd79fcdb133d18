"""The view of `kvrelay top`. It fits 80 columns, and shows more in wider terminals, less in
narrower ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvrelay.cli.views.pending_workers import pending_lines
from kvrelay.cli.views.render import NO_DECISION, rate, router_size, size_change, waiting
from kvrelay.planning.quantity import size

if TYPE_CHECKING:
    from kvrelay.types.control_plane import ScalingDecision
    from kvrelay.types.workers import WorkerLoad
    from kvrelay.wire.cluster import ClusterStatus, PoolStatus, WorkerStatus

# Characters.
BAR = 12
DECISIONS = 5
# On a terminal with too few lines for all workers.
_FEW_DECISIONS = 2
# Columns of a terminal that has room for bars, rates and memory.
_FULL = 72
# The colours of the status page.
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "stuck": "red"}
_POOL_STYLES = {"prefill": "blue", "decode": "green"}
# Least columns, so that a column keeps its width when its numbers grow.
_WIDTHS = {"state": 8, "run": 4, "wait": 5, "tok/s": 8, "RSS": 8}


def top_view(
    status: ClusterStatus, trouble: str = "", width: int = 80, height: int | None = None
) -> RenderableType:
    """Renders a status in `width` columns. `trouble` is the reason why the status is not current;
    empty if it is.

    With a `height` in lines that is too small for all, shows fewer decisions and workers, and the
    number of the other workers.
    """
    view = _view(status, trouble, width, DECISIONS)
    if height is None or _height_of(view, width) <= height:
        return view
    workers = [len(pool.workers) for pool in status.pools]
    others = _height_of(_view(status, trouble, width, _FEW_DECISIONS), width) - sum(workers)
    return _view(status, trouble, width, _FEW_DECISIONS, rows_that_fit(workers, height - others))


def rows_that_fit(workers: Sequence[int], lines: int) -> int:
    """Returns the most rows of each pool that fit together in `lines`, where a pool with more
    workers takes one more line. `workers`: of each pool.
    """

    def needed(most: int) -> int:
        return sum(min(count, most) + (count > most) for count in workers)

    return next(
        (most for most in range(max(workers, default=0), 0, -1) if needed(most) <= lines), 0
    )


def _height_of(view: RenderableType, width: int) -> int:
    return len(Console(width=width).render_lines(view))


def _view(
    status: ClusterStatus, trouble: str, width: int, decisions: int, rows: int | None = None
) -> RenderableType:
    """Renders a status with at most so many decisions, and so many workers of each pool."""
    pool_of = _pool if width >= _FULL else _narrow_pool
    parts: list[RenderableType] = [
        _header(status, trouble, width),
        *(pool_of(one, rows) for one in status.pools),
    ]
    if status.decisions:
        parts.append(_decisions(status.decisions[:decisions]))
    else:
        parts.append(Text(NO_DECISION, "dim"))
    parts += (_delayed(one) for one in status.delayed)
    return Group(*parts)


def full_screen(view: RenderableType, hint: str) -> Layout:
    """Renders a view on a whole screen, with a hint in the last line. A view that is too long is
    cut.
    """
    screen = Layout()
    screen.split_column(Layout(view), Layout(Text(hint, "dim"), size=1))
    return screen


def bar(share: float, style: str = "green") -> Text:
    """Renders a share as a bar and a percentage in the style of a pool; red from 90 %."""
    filled = round(min(1.0, max(0.0, share)) * BAR)
    style = "red" if share >= 0.9 else style
    return Text.assemble(
        ("█" * filled, style), ("░" * (BAR - filled), "bright_black"), f" {share:4.0%}"
    )


def _header(status: ClusterStatus, trouble: str, width: int) -> Panel:
    of_models = f" (1 of {len(status.models)} models)" if len(status.models) > 1 else ""
    lines = _figures(status, width)
    if status.registry != "ok":
        lines.append(Text(f"registry: {status.registry}", "yellow"))
    if status.standby:
        standbys = ", ".join(
            f"{one.worker_id} {one.state} {size(one.rss_bytes)}" for one in status.standby
        )
        lines.append(Text(f"standby: {standbys}"))
    lines += [Text(line, "yellow") for line in pending_lines(status.pending)]
    if trouble:
        lines.append(Text(f"last known state, retrying: {trouble}", "bold red"))
    return Panel(
        Text("\n").join(lines),
        title=Text(f"kvrelay {status.model}{of_models}"),
        title_align="left",
        subtitle=router_size(status.router),
        subtitle_align="left",
        border_style="red" if trouble else "",
    )


def _figures(status: ClusterStatus, width: int) -> list[Text]:
    """The lines of figures. Each figure has its line, whatever the numbers are: what is below does
    not move. The rates are by pool, because prefill counts prompt tokens and decode answers.
    """
    router = status.router
    requests = f"{router.running} running, {waiting(router)}"
    ended = f"{router.finished} finished, {router.failed} failed"
    latencies = f"p95 TTFT {_ms(router.ttft_p95_ms)}", f"ITL {_ms(router.itl_p95_ms)}"
    rates = [
        f"{pool.name} {rate(sum(one.load.tokens_per_second for one in pool.workers))} tok/s"
        for pool in status.pools
    ]
    state = (status.state, _STATE_STYLES.get(status.state, ""))
    if width >= _FULL:
        rest = ["   ".join((ended, *latencies)), "   ".join(rates)]
        lines = [Text.assemble(state, f"   requests {requests}"), *map(Text, rest)]
    else:
        rest = [requests, ended, "   ".join(latencies), *rates]
        lines = [Text.assemble(state), *map(Text, rest)]
    for line in lines:
        line.truncate(width - 4, overflow="ellipsis")
    return lines


def _pool(pool: PoolStatus, rows: int | None) -> Table:
    table = _pool_table(pool, rows, min_width=10)
    table.add_column("state", no_wrap=True, min_width=_WIDTHS["state"])
    for name in ("run", "wait"):
        table.add_column(name, justify="right", no_wrap=True, min_width=_WIDTHS[name])
    table.add_column("KV held", no_wrap=True, min_width=BAR + 5)
    for name in ("tok/s", "RSS"):
        table.add_column(name, justify="right", no_wrap=True, min_width=_WIDTHS[name])
    for worker in pool.workers[:rows]:
        table.add_row(*_worker(worker))
    return table


def _narrow_pool(pool: PoolStatus, rows: int | None) -> Table:
    """The same without bars, rates and memory."""
    table = _pool_table(pool, rows, min_width=6)
    table.add_column("state", no_wrap=True, min_width=_WIDTHS["state"])
    for name in ("run", "wait", "KV"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4)
    for worker in pool.workers[:rows]:
        worker_id, state, running, queued, *_ = _worker(worker)
        table.add_row(worker_id, state, running, queued, f"{_held(worker.load):.0%}")
    return table


def _pool_table(pool: PoolStatus, rows: int | None, min_width: int) -> Table:
    """Returns a table with the title of the pool and the column of the workers' names. Below it is
    the number of the workers that have no row.
    """
    hidden = Counter(worker.state for worker in _hidden(pool, rows))
    told = ", ".join(f"{count} {state}" for state, count in hidden.items())
    ready = sum(worker.state == "ready" for worker in pool.workers)
    table = Table(
        title=Text.assemble(
            (pool.name, f"bold {_POOL_STYLES[pool.name]}"),
            f"  {ready} ready of {pool.desired}",
            style="" if ready >= pool.desired else "yellow",
        ),
        title_justify="left",
        title_style="",
        caption=f"+{hidden.total()} more: {told}" if hidden else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        expand=True,
        padding=(0, 1 if min_width >= 10 else 0, 0, 0),
    )
    table.add_column("worker", no_wrap=True, ratio=1, min_width=min_width)
    return table


def _hidden(pool: PoolStatus, rows: int | None) -> Sequence[WorkerStatus]:
    return () if rows is None else pool.workers[rows:]


def _held(load: WorkerLoad) -> float:
    """Returns the share of a worker's KV blocks that requests hold."""
    return load.blocks_held / load.blocks_total if load.blocks_total else 0.0


def _worker(worker: WorkerStatus) -> tuple[RenderableType, ...]:
    load = worker.load
    state = (
        Text(worker.state, _STATE_STYLES[worker.state])
        if load.integrity_ok
        else Text("BROKEN", "bold red")
    )
    return (
        Text(worker.worker_id),
        state,
        str(load.running),
        str(load.waiting),
        bar(_held(load), _POOL_STYLES[worker.pool]) if load.blocks_total else Text("-"),
        rate(load.tokens_per_second),
        size(load.rss_bytes),
    )


def _decisions(decisions: tuple[ScalingDecision, ...]) -> Table:
    table = Table(
        title=Text("scaling", "bold"),
        title_justify="left",
        box=None,
        expand=True,
        show_header=False,
    )
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for one in decisions:
        time = datetime.fromtimestamp(one.unix_time).astimezone().strftime("%H:%M:%S")
        table.add_row(time, one.pool, f"{one.before} → {one.after}", Text(one.reason))
    return table


def _delayed(decision: ScalingDecision) -> Text:
    told = f"delayed  {size_change(decision)}  {decision.reason}"
    return Text(told, "dim", no_wrap=True, overflow="ellipsis")


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f} ms"
