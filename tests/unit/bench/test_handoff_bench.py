"""`kvrelay bench handoff` on real processes, with few and small cases."""

from __future__ import annotations

import inspect
import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from kv_transfer.push import Push
from kv_transfer.sender import Sender
from kvrelay.bench.handoff.exposed import Exposed, Nowhere
from kvrelay.bench.handoff.rates import Rate
from kvrelay.bench.handoff.run import HandoffReport
from kvrelay.bench.handoff.table import report_view
from kvrelay.bench.handoff.wire_limits import WireLimits

MIB = 2**20


def test_what_replaces_the_sender_is_called_like_it() -> None:
    for original, name in (
        (Sender, "open"),
        (Sender, "close"),
        (Push, "send"),
        (Push, "abort"),
    ):
        expected, found = (
            inspect.signature(getattr(one, name)).parameters for one in (original, Nowhere)
        )
        assert [str(one) for one in found.values()] == [str(one) for one in expected.values()], name


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
@pytest.mark.long
def test_the_command_measures_what_it_says() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "bench", "handoff", "--quick", "--json"]
    options = ["--model", "demo", "--runs", "1", "--transport", "shm", "--transport", "grpc"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["limits"]["memcpy"] > 0
    assert report["limits"]["loopback"] > 0
    assert {(one["transport"], one["digests"]) for one in report["rates"]} == {
        (transport, digests) for transport in ("shm", "grpc") for digests in (True, False)
    }
    for one in report["rates"]:
        assert one["bytes_per_second"] == pytest.approx(one["num_bytes"] / one["seconds"])
    for one in report["exposed"]:
        assert one["tokens"] == 512
        assert 0 < one["exposed"] < one["prefill"] + 10
        assert one["num_bytes"] > 0


def test_a_report_on_a_terminal() -> None:
    rates = tuple(
        Rate("shm", 64 * MIB, digests, seconds)
        for digests, seconds in ((True, 0.011), (False, 0.010))
    )
    exposed = (Exposed("shm", 2048, 32 * MIB, prefill=1.02, alone=1.0, exposed=0.05),)
    report = HandoffReport(
        "m200",
        "a CPU",
        (0, 1),
        512,
        "no compiler",
        WireLimits((12e9,), (3e9, 4e9, 6e9)),
        rates,
        exposed,
    )
    assert report.share(rates[0]) == pytest.approx(64 * MIB / 0.011 / 12e9)
    assert report.digest_cost(rates[0]) == pytest.approx(0.1)
    out = io.StringIO()
    Console(width=120, file=out).print(report_view(report))
    text = out.getvalue()
    for words in (
        "memcpy 12.0 GB/s",
        "4.0 GB/s (single passes 3.0 to 6.0)",
        "no compiler",
        "6.10",
        "+10%",
        "+2.0%",
        "5.0%",
        "50.0",
    ):
        assert words in text, text
