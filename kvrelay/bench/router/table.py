"""A report on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.bench.router.run import RouterReport

_MIB = 2**20


def report_view(report: RouterReport) -> RenderableType:
    growth = report.growth
    head = (
        f"{report.machine}; the router on core {report.cores[0]}, workers and clients on core "
        f"{report.cores[1]}"
    )
    table = Table(title="tokens through the router", title_justify="left")
    for column in (
        "endpoint",
        "streams",
        "offered/s",
        "delivered/s",
        "per message",
        "core used",
        "tokens/s and core",
        "adds p50, ms",
        "p99, ms",
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
        f"{growth.requests:,} requests at {growth.requests_per_second:,.0f} a second: "
        f"{growth.half / _MIB:.1f} MiB resident after half of them, {growth.whole / _MIB:.1f} MiB "
        f"after the last"
    )
    return Group(head, table, memory)
