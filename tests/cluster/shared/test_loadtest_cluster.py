"""The load harness against a real cluster, as users run it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.running_cluster import RunningCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
TRACES = Path(__file__).parents[2] / "unit" / "loadtest" / "traces"
SAMPLE = TRACES / "mooncake_conversation_60.jsonl"


async def loadtest(file: Path, *arguments: str) -> dict[str, Any]:
    """What the command wrote; it must end well."""
    command = [
        sys.executable,
        "-m",
        "kvrelay.cli.main",
        "loadtest",
        *arguments,
        "--json",
        str(file),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    document: dict[str, Any] = json.loads(await asyncio.to_thread(file.read_text))
    return document


async def test_open_loop_over_grpc_with_a_timeline(cluster: RunningCluster, tmp_path: Path) -> None:
    ends = cluster.local.endpoints
    load = [
        "--rate",
        "2-8:2,8:1",
        "--prompt-tokens",
        "100-300",
        "--output-tokens",
        "4-8",
        "--admin",
        ends.admin,
    ]
    document = await loadtest(tmp_path / "run.json", "run", "--target", ends.grpc, *load)
    rows = document["requests"]
    assert 5 < len(rows) < 40
    for row in rows:
        ledger = row["ledger"]
        assert sum(ledger["phases"].values()) == pytest.approx(ledger["ttft_seconds"])
        assert ledger["ttft_seconds"] <= row["ttft_s"]  # from the scheduled arrival, at the client
        if row["path"] == "disaggregated":
            assert ledger["handoff"]["bytes"] > 0
    assert "disaggregated" in document["paths"]
    samples = document["timeline"]["samples"]
    assert len(samples) >= 3
    assert {name: pool["workers"] for name, pool in samples[-1]["pools"].items()} == {
        "prefill": 2,
        "decode": 2,
    }


async def test_closed_loop_over_http(cluster: RunningCluster, tmp_path: Path) -> None:
    load = [
        "--concurrency",
        "4",
        "--num-requests",
        "12",
        "--prompt-tokens",
        "90",
        "--output-tokens",
        "5",
    ]
    target = ["--target", cluster.local.endpoints.http, "--vocab-size", "2048"]
    document = await loadtest(tmp_path / "run.json", "run", *target, *load)
    assert [row["output_tokens"] for row in document["requests"]] == [5] * 12
    assert all(row["ledger"]["phases"]["prefill"] > 0 for row in document["requests"])
    assert document["timeline"] is None  # an HTTP target does not say where its admin listener is
    assert document["reuse"]["counters"]["queries"] >= 12 * 90


async def test_a_replayed_trace_reuses_what_it_shares(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """Block 0 is everybody's; the first request has computed it before the last ones come."""
    ends = cluster.local.endpoints
    trace = ["--trace", str(SAMPLE), "--length-scale", "1/16", "--time-scale", "1/2", "--seed", "7"]
    where = ["--target", ends.grpc, "--admin", ends.admin, "--metrics", ends.http]
    document = await loadtest(tmp_path / "run.json", "run", *trace, "--num-requests", "30", *where)
    reuse = document["reuse"]
    assert reuse["block_tokens"] == (await cluster.status()).block_size
    assert reuse["prompt"] == sum(row["prompt_tokens"] for row in document["requests"])
    assert 0 < reuse["reported"] <= reuse["unlimited"]
    assert reuse["counters"] == {"hits": reuse["reported"], "queries": reuse["prompt"]}


async def test_a_sweep_finds_a_rate(cluster: RunningCluster, tmp_path: Path) -> None:
    load = [
        "--rates",
        "4,8",
        "--num-requests",
        "8",
        "--prompt-tokens",
        "80",
        "--output-tokens",
        "3",
    ]
    goodput = ["--goodput", "e2e:60000"]
    document = await loadtest(
        tmp_path / "sweep.json", "sweep", "--target", cluster.local.endpoints.grpc, *load, *goodput
    )
    assert document["best_rate"] == 8
    # No rate profits from the one before
    assert all(run["reuse"]["reported"] == 0 for run in document["runs"])
