"""Renders a report, a sweep, or a comparison of two reports as an HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from kvrelay.loadtest.html_report.distributions import distribution
from kvrelay.loadtest.html_report.phases import segments, ttft_parts
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.series import binned
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.sweep import Sweep

# Requests.
MAX_GANTT = 240
# Points of a time series.
MAX_POINTS = 2000
_SCRIPTS = ("page.kit.js", "page.plots.js", "page.pareto.js", "page.timeline.js", "page.js")
Json = dict[str, Any]
Point = TypeVar("Point")


def page(result: Report | Sweep) -> str:
    """Returns a complete HTML document."""
    if isinstance(result, Sweep):
        # The page shows the run at the goodput rate, or the slowest run if there is no such rate.
        rate = result.best_rate
        shown = [one for one in result.runs if one[0] == rate] or list(result.runs[:1])
        names = [f"{one:.4g} requests/s" for one, _ in shown]
        return _document("Sweep", [report for _, report in shown], names, _sweep(result))
    return _document("Load test", [result], ["this run"], None)


def compare_page(reports: tuple[Report, Report], names: tuple[str, str]) -> str:
    """Returns a complete HTML document that compares the two reports."""
    return _document("Comparison", reports, names, None)


def pareto_page(document: Json) -> str:
    """Returns a complete HTML document for a sweep of simulations, given as plain data."""
    return _document("Simulated clusters", [], [], None, document)


def _document(
    title: str,
    reports: Sequence[Report],
    names: Sequence[str],
    sweep: Json | None,
    pareto: Json | None = None,
) -> str:
    samples = [report.samples() for report in reports]
    data = {
        "title": title,
        "sweep": sweep,
        "pareto": pareto,
        "latencies": {name: distribution([one[name] for one in samples]) for name in samples[0]}
        if samples
        else {},
        "runs": [_run(report, name) for report, name in zip(reports, names, strict=True)],
    }
    # A script element ends at the first "</". Inside JSON strings, "<" may be written as an escape.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = "\n".join(map(_part, _SCRIPTS))
    parts = {"style": _part("page.css"), "script": script, "data": text}
    document = _part("page.html")
    for name, part in parts.items():
        document = document.replace(f"{{{{{name}}}}}", part)
    return document


@cache
def _part(name: str) -> str:
    return files("kvrelay.loadtest.html_report").joinpath(name).read_text(encoding="utf-8")


def _run(report: Report, name: str) -> Json:
    answered = report.answered
    slowest = sorted(answered, key=lambda row: row.ttft_s or 0.0)[-max(1, len(answered) // 10) :]
    return {
        "name": name,
        "options": {
            key: value
            for key, value in report.options.items()
            if value is not None and key != "cut"
        },
        "slos": {slo.metric: slo.milliseconds for slo in report.slos},
        "warnings": report.warnings,
        "requests": len(report.rows),
        "answered": len(answered),
        "duration": report.duration_s,
        "rates": report.rates(),
        "good_share": report.good_share if report.slos else None,
        "latencies": {key: one and asdict(one) for key, one in report.latencies().items()},
        "reuse": report.reuse
        and {**report.reuse.shares(), "block_tokens": report.reuse.block_tokens},
        "paths": [[*key, count] for key, count in _paths(answered)],
        "errors": _errors(report.rows),
        "strayed": len(report.strayed),
        "parts": {"mean": ttft_parts(answered), "slowest tenth": ttft_parts(slowest)},
        "dots": [
            [row.scheduled_s, (row.ttft_s or 0.0) * 1000, row.path] for row in _thinned(answered)
        ],
        "binned": asdict(binned(report)),
        "timeline": report.timeline
        and asdict(replace(report.timeline, samples=_thinned(report.timeline.samples))),
        "gantt": _gantt(report.rows),
    }


def _sweep(sweep: Sweep) -> Json:
    return {
        "attainment": sweep.attainment,
        "best": sweep.best_rate,
        "warnings": sweep.warnings,
        "slos": {slo.metric: slo.milliseconds for slo in sweep.runs[0][1].slos}
        if sweep.runs
        else {},
        "runs": [
            {
                "rate": rate,
                "share": report.good_share,
                "goodput": report.rates().get("goodput requests", 0.0),
                "errors": sum(report.errors.values()),
                "latencies": {key: one and asdict(one) for key, one in report.latencies().items()},
            }
            for rate, report in sweep.runs
        ],
    }


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Returns every n-th point, so that at most MAX_POINTS are drawn."""
    return tuple(points[:: -(-len(points) // MAX_POINTS) or 1])


def _paths(rows: Sequence[Row]) -> list[tuple[tuple[str, str], int]]:
    """Counts requests by path and reason. Numbers in a reason are masked, because they differ
    between requests.
    """
    return Counter((row.path or "not reported", _reason(row.why)) for row in rows).most_common(12)


def _reason(why: str) -> str:
    words = ("n" if word.strip(",;").isdecimal() else word for word in why.split())
    return " ".join(words)


def _errors(rows: Sequence[Row]) -> list[Json]:
    found: dict[str, Json] = {}
    for row in rows:
        if row.error:
            one = found.setdefault(row.error, {"code": row.error, "count": 0, "first": row.message})
            one["count"] += 1
    return sorted(found.values(), key=lambda one: -one["count"])


def _gantt(rows: Sequence[Row]) -> Json:
    """Returns every n-th request, so that at most MAX_GANTT are drawn."""
    step = -(-len(rows) // MAX_GANTT) or 1
    return {"step": step, "rows": [_bar(row) for row in rows[::step]]}


def _bar(row: Row) -> Json:
    handoff = row.ledger.handoff if row.ledger else None
    workers = (
        [one.prefill_worker or one.decode_worker for one in row.ledger.attempts]
        if row.ledger
        else []
    )
    return {
        "id": row.index,
        "at": row.scheduled_s,
        "segments": [
            [kind, round(start, 6), round(stop, 6)] for kind, start, stop in segments(row)
        ],
        "first": None if row.ttft_s is None else row.scheduled_s + row.ttft_s,
        "tokens": [row.prompt_tokens, row.cached_tokens, row.output_tokens],
        "path": row.path,
        "why": row.why,
        "workers": workers,
        "handoff": handoff
        and {"transport": handoff.transport, "bytes": handoff.bytes, "ms": handoff.seconds * 1000},
        "error": f"{row.error}: {row.message}" if row.error else "",
    }
