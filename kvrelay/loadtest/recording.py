"""The history of the pools, on which a scaling policy can be tried: from a load test's report, or
from a CSV file.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import get_args

from autoscaler.replay import Moment
from autoscaler.scaling_policy import PoolSnapshot
from kvrelay.config.autoscaling_policy import MetricName
from kvrelay.config.bounded_file import bounded_lines
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.series import first_tokens, token_gaps
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.percentiles import percentile
from kvrelay.types.workers import POOLS, PoolName

# Time window of a percentile.
LATENCY_WINDOW_S = 10.0
_KEYS = ("seconds", "pool", "size", "ready")
_BUSY = "busy_share"
METRICS: tuple[MetricName, ...] = get_args(MetricName)


class _Events:
    """Values by time."""

    def __init__(self, events: Iterable[tuple[float, float]]) -> None:
        """`events` are (time, value), in any order."""
        by_time = sorted(events)
        self._times = [at for at, _ in by_time]
        self._values = [value for _, value in by_time]

    def between(self, begin: float, end: float) -> list[float]:
        """Returns the values after `begin` and until `end`."""
        return self._values[bisect_right(self._times, begin) : bisect_right(self._times, end)]


def moments_of(report: Report) -> list[Moment]:
    """Returns the moments at which the test sampled the cluster. Raises InvalidArgument for a
    report without a timeline.
    """
    if report.timeline is None or not report.timeline.samples:
        raise InvalidArgument(
            "the report contains no timeline of the cluster; record one with `kvrelay "
            "loadtest run --admin HOST:PORT --json FILE`",
            field="metrics",
        )
    measured: tuple[tuple[MetricName, _Events], ...] = (
        ("ttft_p95_ms", _Events(first_tokens(report.answered))),
        ("itl_p95_ms", _Events(token_gaps(report.answered))),
    )
    moments = []
    for sample in report.timeline.samples:
        shared: dict[MetricName, float] = {}
        for name, events in measured:
            recent = sorted(events.between(sample.at_s - LATENCY_WINDOW_S, sample.at_s))
            if recent:
                shared[name] = 1000 * percentile(recent, 95)
            elif not sample.running and not sample.waiting:
                shared[name] = 0.0
        pools: dict[PoolName, PoolSnapshot] = {}
        seen = sample.pools
        prompts = sample.waiting_for_prefill
        queued = {"prefill": prompts, "decode": sample.waiting - prompts}
        for pool in POOLS:
            one = seen.get(pool)
            if one is None:
                continue
            metrics: dict[MetricName, float] = {
                "kv_occupancy": one.kv_share - one.leased_share,
                "queue_depth": one.waiting + queued[pool],
            }
            # The timeline does not record how many tokens wait in the router.
            if pool == "prefill":
                metrics["queue_tokens"] = one.waiting_tokens
            metrics |= shared
            if pool == "prefill" and queued["decode"]:
                # This TTFT includes the wait for a batch slot, which more prefill workers do not
                # shorten.
                metrics.pop("ttft_p95_ms", None)
            pools[pool] = PoolSnapshot(one.desired, one.workers, metrics, one.busy_share)
        moments.append(Moment(sample.at_s, pools))
    return moments


def read_moments(file: Path) -> list[Moment]:
    """Reads a CSV file with the columns seconds, pool, size, ready, any of a policy's metrics, and
    optionally busy_share (0 to 1), one row per pool and moment.

    An empty field is unknown. Raises InvalidArgument, naming the line.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(_rows(file, csv.reader(bounded_lines(lines))))
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", field="metrics") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"{file}: not CSV: {error}", field="metrics") from error
    if not rows:
        raise InvalidArgument(f"{file}: the file has no rows", field="metrics")
    grouped = groupby(rows, key=lambda row: row[0])
    return [Moment(at, {pool: snapshot for _, pool, snapshot in group}) for at, group in grouped]


def _rows(file: Path, rows: Iterator[list[str]]) -> Iterator[tuple[float, PoolName, PoolSnapshot]]:
    header = next(rows, [])
    names = [metric for metric in METRICS if metric in header]
    others = [name for name in header if name != _BUSY]
    if sorted(others) != sorted([*_KEYS, *names]) or not names or header.count(_BUSY) > 1:
        allowed = f"{', '.join(_KEYS)}, optionally {_BUSY}, and some of {', '.join(METRICS)}"
        raise InvalidArgument(
            f"{file}:1: the columns are {', '.join(header)}; expected {allowed}", field="metrics"
        )
    before = 0.0
    for number, row in enumerate(rows, 2):
        try:
            fields = dict(zip(header, row, strict=True))
            at, pool = float(fields["seconds"]), next(one for one in POOLS if one == fields["pool"])
            size, ready = int(fields["size"]), int(fields["ready"])
            metrics = {name: float(fields[name]) for name in names if fields[name]}
            busy = float(fields[_BUSY]) if fields.get(_BUSY) else None
        except (ValueError, StopIteration) as error:
            raise InvalidArgument(
                f"{file}:{number}: the row does not match the columns {', '.join(header)}",
                field="metrics",
            ) from error
        if not (before <= at < float("inf") and size >= 0 and ready >= 0):
            raise InvalidArgument(
                f"{file}:{number}: seconds must not decrease, and sizes must be 0 or more",
                field="metrics",
            )
        if busy is not None and not 0 <= busy <= 1:
            raise InvalidArgument(
                f"{file}:{number}: {_BUSY} is {busy:g}; a share is 0 to 1, or empty if unknown",
                field="metrics",
            )
        before = at
        yield at, pool, PoolSnapshot(size, ready, metrics, busy)
