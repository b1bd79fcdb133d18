"""Formats an engine report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.bench.cases import DecodeCase
from kvrelay.bench.engine_bench import Measured
from kvrelay.bench.regression import decode_fit, prefill_growth
from kvrelay.bench.report import EngineReport


def report_view(report: EngineReport) -> RenderableType:
    """Returns the tables. Times are medians in milliseconds. A share is the time of one limit
    divided by kvrelay's. A ratio above 1 means that the peer is slower.
    """
    limits = report.limits
    rates = ", ".join(f"{dtype} {rate / 1e12:.3f}" for dtype, rate in limits.matrix_rates.items())
    cores = ", ".join(map(str, report.cores))
    where = f"core {cores}" if report.device == "cpu" else f"host cores {cores}"
    head = [
        f"{report.model}: {report.weights} weights, "
        f"{report.cost.weight_bytes(report.weights) / 1e9:.3f} GB read per step",
        f"{report.machine}, {where}; TFLOP/s: {rates}; memory: {limits.bandwidth / 1e9:.1f} GB/s",
        *(
            f"{name}: {facts['ready_seconds']:.1f} s from start to first token"
            for name, facts in report.engines.items()
        ),
    ]
    title = f"prefill in chunks of {report.chunk_tokens} tokens"
    return Group(
        *head,
        _table(report, title, "tokens", report.prefill),
        _table(report, "decode, per step", "batch x\ncontext", report.decode),
        *_fits(report),
    )


def _table(report: EngineReport, title: str, case: str, results: Sequence[Measured]) -> Table:
    ours, *peers = report.names
    # With boxes around the cells, a terminal of 80 columns cuts the headers.
    table = Table(title=f"{title}, ms", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    # The name of a peer, and its version below.
    of_peers = [column for peer in peers for column in (peer.replace(" ", "\n"), "ratio")]
    for column in (
        case,
        ours,
        "tokens/s",
        *of_peers,
        "limit",
        "bound",
        "compute\nshare",
        "memory\nshare",
    ):
        table.add_column(
            column, justify="left" if column in (case, "bound") else "right", no_wrap=True
        )
    for result in results:
        bound = report.bound(result.case)
        seconds = result.median(ours)
        ratio = report.ratio(result)
        table.add_row(
            _name(result),
            _milliseconds(seconds),
            f"{result.case.tokens / seconds:.0f}",
            *([_milliseconds(result.median(peer)) for peer in peers]),
            *([f"{ratio:.2f}"] if ratio is not None else []),
            _milliseconds(bound.seconds),
            bound.name,
            *(f"{least / seconds:.0%}" for least in (bound.compute_seconds, bound.memory_seconds)),
        )
    return table


def _fits(report: EngineReport) -> list[str]:
    lines = []
    for name in report.names:
        growth = prefill_growth(report.prefill, name)
        if growth is not None:
            lines.append(
                f"{name}: the time per token of a 4096-token prompt is {growth:.2f} times that "
                f"of a 512-token prompt"
            )
        fit = decode_fit(report.decode, name, report.cost)
        if fit is not None:
            lines.append(
                f"{name}: a decode step takes {fit.step_seconds * 1e3:.2f} ms + "
                f"{fit.sequence_seconds * 1e3:.3f} ms per "
                f"sequence + {fit.kv_byte_seconds * 1e12:.1f} ms per GB of KV (R² {fit.r2:.4f})"
            )
    return lines


def _name(result: Measured) -> str:
    case = result.case
    if isinstance(case, DecodeCase):
        return f"{case.batch} x {case.context}"
    return str(case.tokens)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
