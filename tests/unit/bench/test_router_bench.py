"""`kvrelay bench router` on a real router, with few and small cases."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from kvrelay.bench.router.peer_router import Peer
from kvrelay.bench.router.run import Case, Growth, Measured, RouterReport
from kvrelay.bench.router.table import report_view


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
@pytest.mark.long
@pytest.mark.parametrize("processes", ["1", "3"])
def test_each_endpoint_streams_what_the_workers_say(processes: str) -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "bench", "router", "--quick", "--json"]
    command += ["--processes", processes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {one["case"]["endpoint"] for one in report["cases"]} == {"grpc", "http"}
    for one in report["cases"]:
        assert one["tokens_per_second"] > 0
        assert 0 < one["router_core"] <= 1.1  # the clock's ticks are coarse
        assert one["tokens_per_message"] >= 1
        assert 0 < one["latency_p50"] <= one["latency_p99"]
    assert report["growth"]["requests"] == 500
    assert len(report["growth"]["resident"]) == 10


def test_a_report_on_a_terminal() -> None:
    measured = Measured(Case("grpc", 256, 10_000), 9_900.0, 1.25, 0.5, 0.001, 0.004)
    other = replace(measured, case=Case("http", 256, 10_000, Peer("sglang-router", "/bin/python")))
    report = RouterReport(
        "a CPU",
        (0, 1),
        4,
        (measured, other),
        Growth(100_000, (*[100 * 2**20] * 9, 101 * 2**20), 900.0),
    )
    assert measured.tokens_per_core == pytest.approx(19_800)
    out = io.StringIO()
    Console(width=140, file=out).print(report_view(report))
    for words in (
        "in 4 processes",
        "19,800",
        "http, sglang-router",
        "1.25",
        "50%",
        "4.00",
        "100.0 MiB",
        "101.0 MiB",
        "100,000 requests",
    ):
        assert words in out.getvalue()
