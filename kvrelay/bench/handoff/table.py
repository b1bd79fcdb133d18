"""Formats a hand-off report for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.bench.handoff.run import HandoffReport

_MIB = 2**20


def report_view(report: HandoffReport) -> RenderableType:
    """Returns the tables. Rates are measured from the first blocks sent on an open push to the
    acknowledged commit. All figures are medians.
    """
    limits = report.limits
    passes = limits.loopback_passes
    head = [
        f"{report.machine}, cores {report.cores[0]} and {report.cores[1]}; "
        f"memcpy {limits.memcpy / 1e9:.1f} GB/s, one loopback connection "
        f"{limits.loopback / 1e9:.1f} GB/s "
        f"(single passes {min(passes) / 1e9:.1f} to {max(passes) / 1e9:.1f})"
    ]
    if report.without_kernel:
        head.append(f"blocks are copied and digested in two passes: {report.without_kernel}")
    return Group(*head, _rates(report), _exposed(report))


def _table(title: str) -> Table:
    # With boxes around the cells, a terminal of 80 columns cuts the headers.
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _rates(report: HandoffReport) -> Table:
    table = _table(f"hand-off of {report.model}'s KV")
    for column in ("transport", "MiB", "ms", "GB/s", "limit", "share", "digest\noverhead"):
        table.add_column(column, justify="left" if column in ("transport", "limit") else "right")
    for rate in report.rates:
        if rate.digests:
            table.add_row(
                rate.transport,
                f"{rate.num_bytes / _MIB:g}",
                f"{rate.seconds * 1e3:.1f}",
                f"{rate.bytes_per_second / 1e9:.2f}",
                rate.limit,
                f"{report.share(rate):.0%}",
                f"{report.digest_cost(rate):+.0%}",
            )
    return table


def _exposed(report: HandoffReport) -> Table:
    table = _table(f"hand-off during prefill, chunks of {report.chunk_tokens} tokens")
    for column in (
        "transport",
        "tokens",
        "MiB",
        "prefill\nalone, ms",
        "slowdown",
        "exposed,\nms",
        "share of\nprefill",
    ):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for one in report.exposed:
        table.add_row(
            one.transport,
            str(one.tokens),
            f"{one.num_bytes / _MIB:g}",
            f"{one.alone * 1e3:.0f}",
            f"{one.prefill / one.alone - 1:+.1%}",
            f"{one.exposed * 1e3:.1f}",
            f"{one.exposed / one.alone:.1%}",
        )
    return table
