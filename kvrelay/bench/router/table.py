"""Formats a router report for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.bench.router.run import Case, RouterReport

_MIB = 2**20


def report_view(report: RouterReport) -> RenderableType:
    """Returns the table of cases and a line about memory."""
    growth = report.growth
    number = f" in {report.processes} processes" if report.processes > 1 else ""
    router, others = report.cores
    head = f"{report.machine}; the router{number} on core {router}, the rest on core {others}"
    # With boxes around the cells, a terminal of 80 columns cuts the headers.
    table = Table(title="router throughput", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in (
        "endpoint",
        "streams",
        "offered\ntokens/s",
        "delivered\ntokens/s",
        "tokens/\nmessage",
        "core\nuse",
        "tokens/s\nper core",
        "added ms\np50",
        "\np99",
    ):
        table.add_column(column, justify="left" if column == "endpoint" else "right", no_wrap=True)
    for one in report.cases:
        table.add_row(
            _name(one.case),
            str(one.case.streams),
            f"{one.case.tokens_per_second:,}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_message:.2f}",
            f"{one.router_core:.0%}",
            f"{one.tokens_per_core:,.0f}",
            f"{one.latency_p50 * 1e3:.2f}",
            f"{one.latency_p99 * 1e3:.2f}",
        )
    memory = (
        f"{growth.requests:,} requests at {growth.requests_per_second:,.0f} requests/s: "
        f"{growth.half / _MIB:.1f} MiB resident after half of them, {growth.whole / _MIB:.1f} MiB "
        f"after all of them"
    )
    return Group(head, table, memory)


def _name(case: Case) -> str:
    return case.endpoint if case.peer is None else f"{case.endpoint}, {case.peer.name}"
