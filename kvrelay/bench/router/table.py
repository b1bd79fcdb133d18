"""Formats a router report for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.bench.router.run import RouterReport

_MIB = 2**20


def report_view(report: RouterReport) -> RenderableType:
    """Returns the table of cases and a line about memory."""
    growth = report.growth
    head = (
        f"{report.machine}; the router on core {report.cores[0]}, workers and clients on core "
        f"{report.cores[1]}"
    )
    table = Table(title="router throughput", title_justify="left")
    for column in (
        "endpoint",
        "streams",
        "offered/s",
        "delivered/s",
        "tokens/message",
        "core use",
        "tokens/s per core",
        "added p50, ms",
        "added p99, ms",
    ):
        table.add_column(column, justify="left" if column == "endpoint" else "right")
    for one in report.cases:
        table.add_row(
            one.case.endpoint,
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
