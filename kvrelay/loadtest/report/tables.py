"""Formats reports for the terminal."""

from __future__ import annotations

from dataclasses import fields

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from kvrelay.loadtest.report.latency_names import SHORT_NAMES, explanation
from kvrelay.loadtest.report.statistics import Summary
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.sweep import Sweep
from kvrelay.planning.quantity import plain

_COLUMNS = tuple(one.name for one in fields(Summary))

# Options of a load test that change what its figures mean.
_LOAD_OPTIONS = (
    "rate",
    "concurrency",
    "burstiness",
    "num_requests",
    "duration",
    "prompt_tokens",
    "output_tokens",
    "text",
    "trace",
    "trace_start",
    "time_scale",
    "length_scale",
)


def report_table(report: Report) -> RenderableType:
    """Returns the latencies in milliseconds, what each of them is, the rates, the paths and the
    errors of one test.
    """
    table = _narrow("latency, ms")
    table.add_column("")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    known = {key: one for key, one in report.latencies().items() if one is not None}
    for key, summary in known.items():
        cells = (_milliseconds(getattr(summary, column)) for column in _COLUMNS)
        table.add_row(SHORT_NAMES[key], *cells)
    answered = f"{len(report.answered)} of {len(report.rows) + report.in_flight} requests answered"
    if report.rows:
        answered += f" in {report.duration_s:.2f} s, to the end of the last answer"
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in report.rates().items())
    lines = [answered, f"per second of that time: {rates}", f"paths: {_counts(report.paths)}"]
    if report.slos:
        lines.append(
            "goodput: "
            + ", ".join(f"{slo.metric} within {plain(slo.milliseconds)} ms" for slo in report.slos)
        )
    if report.errors:
        lines.append(f"errors: {_counts(report.errors)}")
    if report.reuse is not None and (report.reuse.unlimited or report.reuse.reported):
        lines += _reuse(report.reuse)
    lines += [f"warning: {one}" for one in report.warnings]
    if not known:
        return Group(*lines)
    return Group(*lines, table, *map(explanation, known))


def sweep_table(sweep: Sweep) -> RenderableType:
    """Returns a table with one line per rate. Latencies are in milliseconds."""
    table = _narrow("milliseconds")
    for column in (
        "requests/s",
        "within\nSLOs",
        "goodput/s",
        "errors",
        "TTFT\np50",
        "TTFT\np99",
        "TPOT\np50",
        "ITL\np99",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for rate, report in sweep.runs:
        latencies = report.latencies()
        cells = (("TTFT", "median"), ("TTFT", "p99"), ("TPOT", "median"), ("ITL", "p99"))
        table.add_row(
            plain(rate, 4),
            f"{report.good_share:.0%}",
            f"{report.rates()['goodput requests']:.2f}",
            str(sum(report.errors.values())),
            *(
                "-" if latencies[name] is None else _milliseconds(getattr(latencies[name], one))
                for name, one in cells
            ),
        )
    asked = f"at which at least {sweep.attainment:.0%} of the requests met every objective"
    if sweep.best_rate is None:
        verdict = f"goodput: there is no tested rate {asked}; try lower rates"
    else:
        verdict = (
            f"goodput: {plain(sweep.best_rate, 4)} requests/s is the highest tested rate {asked}"
        )
    warnings = [f"warning {one}" for one in sweep.warnings]
    return Group(table, *map(explanation, ("TTFT", "TPOT", "ITL")), verdict, *warnings)


def _reuse(reuse: Reuse) -> list[str]:
    """Formats the reuse that the target reports and the reuse that was possible."""
    shares = reuse.shares()
    counters = (
        f"; {shares['counters']:.1%} by the target's counters" if "counters" in shares else ""
    )
    return [
        f"prefix reuse: {shares['reported']:.1%} of the prompt tokens, as reported with the "
        f"answers{counters}",
        f"possible reuse with an unlimited cache, blocks of {reuse.block_tokens} tokens: "
        f"{shares['unlimited']:.1%}; counting only blocks that were computed when the request was "
        f"sent: {shares['computed']:.1%}",
    ]


def comparison_table(first: Report, second: Report, names: tuple[str, str]) -> Table:
    """Returns two tests side by side, with the relative change of the second."""
    table = Table()
    table.add_column("")
    for name in (*names, "change"):
        # The names of files may be longer than a terminal.
        table.add_column(name, justify="right", overflow="fold")
    rates = second.rates()
    for name, rate in first.rates().items():
        if name in rates:
            table.add_row(
                f"{name} per second",
                f"{rate:.2f}",
                f"{rates[name]:.2f}",
                _change(rate, rates[name]),
            )
    latencies = second.latencies()
    for name, before in first.latencies().items():
        after = latencies[name]
        if before is None or after is None:
            continue
        table.add_section()
        for column in ("median", "p95", "p99"):
            old, new = getattr(before, column), getattr(after, column)
            table.add_row(
                f"{SHORT_NAMES[name]} {column}, ms",
                _milliseconds(old),
                _milliseconds(new),
                _change(old, new),
            )
    table.add_section()
    table.add_row("errors", str(sum(first.errors.values())), str(sum(second.errors.values())), "")
    return table


def load_differences(first: Report, second: Report) -> str:
    """Returns how the loads of two tests differ, as a text for people; empty if they are alike.
    Their seeds may differ.
    """
    told = []
    for name in _LOAD_OPTIONS:
        values = [one.options.get(name) for one in (first, second)]
        if values[0] != values[1]:
            before, after = ("not set" if one is None else f"{one!s:.60}" for one in values)
            told.append(f"{name} {before} and {after}" if before != after else name)
    return "; ".join(told)


def _narrow(title: str) -> Table:
    """Returns a table without boxes around the cells, which a terminal of 80 columns would cut."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.{1 if seconds < 10 else 0}f}"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before > 0 else "-"


def _counts(counts: dict[str, int]) -> str:
    named = (f"{name or '(not reported)'} {count}" for name, count in counts.items())
    return ", ".join(named) or "none"
