"""Renders the state of a cluster and the ledger of an answer for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from kvrelay.cli.views.pending_workers import pending_lines
from kvrelay.planning.quantity import size

if TYPE_CHECKING:
    from kvrelay.client import Completion
    from kvrelay.types.control_plane import RouterLoad, ScalingDecision
    from kvrelay.types.requests import Attempt, Handoff
    from kvrelay.types.workers import TierLoad
    from kvrelay.wire.cluster import ClusterStatus, PoolStatus, WorkerStatus

# Columns of the full table of workers.
_WIDE = 140
# Columns below which tables show only what fits 40 columns.
_NARROW = 72
# Columns without a terminal. The default of rich, 80, would cut names.
_PIPED_WIDTH = 140
NO_DECISION = "No scaling decision yet."
NO_WORKER = "No worker runs."
# Columns for which `kvrelay status` is laid out without a terminal. Its lines may be longer.
STATUS_WIDTH = 100
# Columns of an output whose lines must not be broken.
UNBROKEN = 10_000


def console(piped_width: int = _PIPED_WIDTH) -> Console:
    """Returns a console for stdout. Markup is off, because names come from the cluster. Without a
    terminal, it has as many columns as COLUMNS says, or `piped_width`.
    """
    plain = Console(markup=False, highlight=False, soft_wrap=False)
    if plain.is_terminal:
        return plain
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else piped_width
    return Console(markup=False, highlight=False, width=width)


def rate(per_second: float) -> str:
    """Formats a number of tokens per second: 5,731.6."""
    return f"{per_second:,.1f}"


def milliseconds(seconds: float | None) -> str:
    """Formats seconds as milliseconds; None is shown as -."""
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def waiting(router: RouterLoad) -> str:
    """Formats the numbers of waiting requests."""
    parts = {"for prefill": router.waiting_for_prefill, "at max_running": router.waiting_at_limit}
    said = ", ".join(f"{number} {what}" for what, number in parts.items() if number)
    return f"{router.waiting} waiting" + (f" ({said})" if said else "")


def router_size(router: RouterLoad) -> str:
    """Formats the number of processes of a router, if it says so, and their memory."""
    processes = {0: "", 1: " of 1 process"}.get(
        router.processes, f" of {router.processes} processes"
    )
    return f"router{processes}, {size(router.rss_bytes)}"


def status_view(status: ClusterStatus, width: int = _PIPED_WIDTH) -> RenderableType:
    """Renders the status of a cluster in `width` columns."""
    pools = ", ".join(_pool_size(status, pool) for pool in status.pools)
    router = status.router
    header = (
        f"{status.model}: {status.state}; {pools}; registry {status.registry}\n"
        f"requests: {router.running} running, {waiting(router)}, "
        f"{router.finished} finished, {router.failed} failed\n{router_size(router)}"
    )
    for engine, names in _workers_by(status, "engine").items():
        if engine:
            header += f"\nengine of {', '.join(names)}: {engine}"
    if status.routing:
        header += f"\nrouting: {status.routing}; autoscaling: {status.autoscaling or 'off'}"
    loads = [worker.load for pool in status.pools for worker in pool.workers]
    if drafts := sum(load.draft_tokens for load in loads):
        accepted = sum(load.accepted_tokens for load in loads)
        share = accepted / drafts
        header += f"\nspeculation: {accepted} of {drafts} draft tokens accepted ({share:.0%})"
    if dropped := sum(load.dropped_tokens for load in loads):
        header += f"\nKV eviction: {dropped} tokens dropped"
    degrees = [
        (one.worker_id, one.tensor_parallel) for pool in status.pools for one in pool.workers
    ]
    if shared := [f"{name} {degree}" for name, degree in degrees if degree > 1]:
        header += f"\ntensor parallelism: {', '.join(shared)}"
    if len(status.controllers) > 1 or any(one.state != "leading" for one in status.controllers):
        each = ", ".join(f"{one.controller_id} {one.state}" for one in status.controllers)
        header += f"\ncontrollers: {each}"
    for what, versions in (
        ("model", _workers_by(status, "model_id")),
        ("protocol", _workers_by(status, "protocol")),
    ):
        # Several versions run during an upgrade.
        if len(versions) > 1:
            header += "".join(
                f"\n{what} {name[:12] or '?'}: {', '.join(names)}"
                for name, names in versions.items()
            )
    if status.restarting:
        header += f"\nwaiting for restart: {', '.join(status.restarting)}"
    for standby in status.standby:
        header += f"\n{standby.worker_id} standby: {standby.state}, RSS {size(standby.rss_bytes)}"
    for line in pending_lines(status.pending):
        header += f"\n{line}"
    for worker in (worker for pool in status.pools for worker in pool.workers):
        if worker.unfit:
            header += f"\n{worker.worker_id} gets no new work: {worker.unfit}"
    notes = {
        worker.worker_id: worker.load.certificate_note
        for pool in status.pools
        for worker in pool.workers
    }
    for name, note in {router.router_id: router.certificate_note, **notes}.items():
        if note:
            header += f"\n{name}: {note}"
    broken = [
        worker for pool in status.pools for worker in pool.workers if not worker.load.integrity_ok
    ]
    if width < _WIDE:
        for worker in broken:
            header += f"\n{worker.worker_id} BROKEN: {worker.load.integrity_error}"
    table = _worker_table(status) if width >= _WIDE else _narrow_worker_table(status, width)
    tables: list[RenderableType] = [
        table if loads else NO_WORKER,
        _decisions(status, width) if status.decisions else NO_DECISION,
    ]
    tables += [f"delayed: {size_change(one)}: {one.reason}" for one in status.delayed]
    tiers = any(worker.load.tiers for pool in status.pools for worker in pool.workers)
    if tiers and width >= _WIDE:
        tables.insert(1, _tier_table(status))
    elif tiers:
        header += "".join(_tier_lines(status))
    return Group(header, *tables)


def _pool_size(status: ClusterStatus, pool: PoolStatus) -> str:
    """Returns `decode 3 of 5 (2 to start)`. Pending workers have lines of their own."""
    pending = sum(one.pool == pool.name for one in status.pending)
    left = pool.desired - len(pool.workers) - pending
    rest = f" ({left} to start)" if left > 0 else ""
    return f"{pool.name} {len(pool.workers)} of {pool.desired}{rest}"


def _narrow_worker_table(status: ClusterStatus, width: int) -> Table:
    """Table of workers without the columns that rarely change. A name contains the pool, unless the
    worker was a standby.
    """
    is_narrow = width < _NARROW
    padding = (0, 0 if is_narrow else 1, 0, 0)
    table = Table(title="workers", title_justify="left", box=box.SIMPLE_HEAD, padding=padding)
    table.add_column("worker", overflow="fold")
    table.add_column("state", no_wrap=True)
    some = slice(1, 4) if is_narrow else slice(None)
    for name in ("pid", "run", "wait", "KV held", "tok/s", "RSS")[some]:
        table.add_column(name, justify="right", no_wrap=True)
    for worker in (worker for pool in status.pools for worker in pool.workers):
        _, state, pid, running, waiting, held, speed, _, _, resident, _ = _worker_row(worker)
        cells = pid, running, waiting, held, speed, resident
        name = worker.worker_id
        if worker.pool not in name:
            name += f" ({worker.pool})"
        table.add_row(name, state, *cells[some])
    return table


def _workers_by(status: ClusterStatus, field: str) -> dict[str, list[str]]:
    """Groups the names of workers by the value of a field."""
    found: dict[str, list[str]] = {}
    for worker in (worker for pool in status.pools for worker in pool.workers):
        found.setdefault(str(getattr(worker, field)), []).append(worker.worker_id)
    return found


def _worker_table(status: ClusterStatus) -> Table:
    """Full table of workers. It has a column for the host if there are several hosts."""
    table = Table(title="workers", title_justify="left")
    workers = [worker for pool in status.pools for worker in pool.workers]
    hosts = ["host"] if len({worker.host for worker in workers}) > 1 else []
    for name in ("pool", "worker", *hosts, "epoch", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("pid", "running", "waiting", "KV held", "tok/s", "weights", "KV", "RSS"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("integrity")
    for worker in workers:
        host = [worker.host] if hosts else []
        table.add_row(worker.pool, worker.worker_id, *host, *_worker_row(worker))
    return table


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    """Cells of one worker, from the epoch on."""
    load = worker.load
    return (
        str(worker.epoch),
        worker.state,
        str(worker.pid or "-"),
        str(load.running),
        str(load.waiting),
        f"{load.blocks_held / load.blocks_total:.0%}" if load.blocks_total else "-",
        rate(load.tokens_per_second),
        size(load.weight_bytes),
        size(load.kv_bytes),
        size(load.rss_bytes),
        "ok" if load.integrity_ok else f"BROKEN: {load.integrity_error}",
    )


def _tier_table(status: ClusterStatus) -> Table:
    """The tiers behind the workers' KV caches."""
    table = Table(title="KV tiers", title_justify="left")
    for name in ("worker", "tier"):
        table.add_column(name, no_wrap=True)
    for name in ("used", "size", "blocks", "hits", "misses", "evicted", "dropped", "errors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last error")
    for worker in (worker for pool in status.pools for worker in pool.workers):
        for tier in worker.load.tiers:
            counts = tier.blocks, tier.hits, tier.misses, tier.evicted, tier.dropped, tier.errors
            table.add_row(
                worker.worker_id,
                tier.kind,
                size(tier.used_bytes),
                size(tier.size_bytes),
                *map(str, counts),
                "; ".join(filter(None, (_down(tier), tier.error))) or "-",
            )
    return table


def _tier_lines(status: ClusterStatus) -> Iterator[str]:
    """What the table of tiers shows, for a narrow terminal."""
    for worker in (worker for pool in status.pools for worker in pool.workers):
        for tier in worker.load.tiers:
            use = f"{size(tier.used_bytes)} of {size(tier.size_bytes)}, {tier.hits} hits"
            errors = f"{tier.errors} errors, the last: {tier.error}" if tier.errors else ""
            told = "; ".join(filter(None, (use, _down(tier), errors)))
            yield f"\n{worker.worker_id} {tier.kind}: {told}"


def _down(tier: TierLoad) -> str:
    """How many stores do not work now; empty if all do."""
    if not tier.skipped:
        return ""
    return f"{tier.skipped} {'store' if tier.skipped == 1 else 'stores'} down"


def size_change(decision: ScalingDecision) -> str:
    """Formats a decision: prefill 1 → 3."""
    return f"{decision.pool} {decision.before} → {decision.after}"


def _decisions(status: ClusterStatus, width: int) -> RenderableType:
    """A table of the last decisions, or a paragraph for each in few columns."""
    title = "last scaling decisions"
    rows = [
        (
            datetime.fromtimestamp(one.unix_time).astimezone().strftime("%H:%M:%S"),
            one.pool,
            f"{one.before} → {one.after}",
            one.reason,
        )
        for one in status.decisions
    ]
    if width < _NARROW:
        return Group(title, *(f"{time} {pool} {change}: {why}" for time, pool, change, why in rows))
    table = Table(title=title, title_justify="left")
    for name in ("time", "pool", "workers", "reason"):
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def ledger_table(completion: Completion) -> RenderableType:
    """Renders the ledger: phases up to the first token, later times, and the hand-off."""
    ledger = completion.ledger
    several_attempts = ledger is not None and len(ledger.attempts) > 1
    table = Table()
    phase = "at the router: phase"
    table.add_column(f"{phase}, sum of all attempts" if several_attempts else phase)
    table.add_column("time", justify="right")
    if ledger is None:
        table.add_row("no ledger received", "")
        return Group(f"{completion.path}: {completion.why}", table)
    for name, seconds in ledger.phases:
        table.add_row(name, milliseconds(seconds))
    table.add_section()
    table.add_row("TTFT, the sum", milliseconds(ledger.ttft_seconds))
    # An answer of one token has no time between tokens.
    several = completion.usage.completion_tokens > 1
    gap, decode = (
        (ledger.second_token_gap_seconds, ledger.decode_seconds) if several else (None,) * 2
    )
    table.add_row("gap to token 2", milliseconds(gap))
    table.add_row("first to last token", milliseconds(decode))
    table.add_row("end to end", milliseconds(ledger.e2e_seconds))
    # The other times are of the router's clock.
    table.add_section()
    table.add_row("TTFT at this client", milliseconds(completion.ttft_seconds))
    lines = [_handoff_line(ledger.handoff)] if ledger.handoff else []
    if thought := completion.usage.reasoning_tokens:
        lines.append(f"thinking: {thought} of {completion.usage.completion_tokens} tokens")
    if (fetch := ledger.fetch) is not None:
        place = "another worker" if fetch.source == "worker" else f"the tier {fetch.source}"
        lines.append(
            f"fetched from {place}: KV of {fetch.tokens} tokens in {milliseconds(fetch.seconds)}"
        )
    if ledger.dropped_tokens:
        lines.append(
            f"kv.eviction: the last token did not attend to {ledger.dropped_tokens} of the tokens "
            "before it"
        )
    if several_attempts:
        lines += _attempt_lines(ledger.attempts)
    return Group(f"{completion.path}: {completion.why}", table, *lines)


def _attempt_lines(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Describes each attempt with its own phases, also those after the first token."""
    total = 0.0
    for number, one in enumerate(attempts, 1):
        workers = " and ".join(filter(None, (one.prefill_worker, one.decode_worker)))
        seconds = sum(part for _, part in one.phases)
        total += seconds
        # Routers of an older release send no phases of attempts.
        took = f", {milliseconds(seconds)}" if one.phases else ""
        yield f"attempt {number} on {workers}{took}: {one.outcome}"
        if one.phases:
            yield "  " + ", ".join(f"{name} {milliseconds(part)}" for name, part in one.phases)
    if total:
        yield f"all attempts, from the arrival to the last token: {milliseconds(total)}"


def _handoff_line(handoff: Handoff) -> str:
    after = milliseconds(handoff.exposed_seconds)
    when = (
        "all of it after the prefill"
        if after == milliseconds(handoff.seconds)
        else f"{after} of it after the prefill"
    )
    cached = handoff.cached_blocks
    told = f"; the decode worker had {cached} more already" if cached else ""
    return (
        f"hand-off over {handoff.transport}: {handoff.blocks} blocks x {size(handoff.block_bytes)} "
        f"= {size(handoff.bytes)} in {milliseconds(handoff.seconds)}, {when}{told}"
    )
