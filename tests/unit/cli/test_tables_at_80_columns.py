"""Every table of the command line is readable on a terminal of 80 columns: no header is cut, and no
word of a header is broken.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from support import simulated

from kvrelay.bench import table as engine_table
from kvrelay.bench.cases import all_cases
from kvrelay.bench.cost import ModelCost
from kvrelay.bench.engine_bench import Measured
from kvrelay.bench.handoff import table as handoff_table
from kvrelay.bench.handoff.exposed import Exposed
from kvrelay.bench.handoff.rates import Rate
from kvrelay.bench.handoff.run import HandoffReport
from kvrelay.bench.handoff.wire_limits import WireLimits
from kvrelay.bench.limits import Limits
from kvrelay.bench.report import EngineReport
from kvrelay.bench.router import run as router_bench
from kvrelay.bench.router import table as router_table
from kvrelay.cli.check import _memory_table
from kvrelay.cli.demo import Claim
from kvrelay.cli.demo import _table as claims_table
from kvrelay.cli.experiments.profile import profile_view
from kvrelay.cli.main import run
from kvrelay.cli.views.render import ledger_table, status_view
from kvrelay.client import Completion
from kvrelay.launch.checks.memory_plan import PoolMemory
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.tables import comparison_table, report_table, sweep_table
from kvrelay.loadtest.slo import parse_slos
from kvrelay.loadtest.sweep import Sweep
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from kvrelay.types.requests import Attempt, Ledger, Usage
from kvrelay.types.workers import POOLS, WorkerLoad
from kvrelay.wire.cluster import ClusterStatus, PoolStatus, WorkerStatus

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 80
MIB = 2**20


def engine_report(peer: str) -> RenderableType:
    """The largest figures of `kvrelay bench engine`."""
    cost = ModelCost(
        16, 16, 4, 64, body=180_355_072, head=8_388_608, max_model_len=8192, vocab_size=8192,
        dtype="bfloat16",
    )  # fmt: skip
    limits = Limits(1, {"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}, bandwidth=2e10)
    names = ("kvrelay", peer) if peer else ("kvrelay",)
    cases = (*all_cases().prefill, *all_cases().decode)
    report = EngineReport(
        "m200", "a CPU", "cpu", (0,), limits, cost, "bfloat16", 512,
        {name: {"name": name, "ready_seconds": 1.5} for name in names},
        tuple(Measured(case, dict.fromkeys(names, (123.4567,) * 3)) for case in cases),
    )  # fmt: skip
    return engine_table.report_view(report)


def router_report() -> RenderableType:
    """Figures of the largest cases."""
    cases = tuple(
        router_bench.Measured(
            router_bench.Case(endpoint, 1024, 100_000), 99_876.5, 12.345, 0.999, 0.1234, 1.23456
        )
        for endpoint in ("grpc", "http")
    )
    growth = router_bench.Growth(100_000, (100 * MIB,) * 10, 900.0)
    return router_table.report_view(
        router_bench.RouterReport("a CPU of many words, 3.10 GHz", (0, 1), 16, cases, growth)
    )


def handoff_report() -> RenderableType:
    rates = [
        Rate(transport, 512 * MIB, digests, 1.2345)
        for transport in ("shm", "grpc")
        for digests in (True, False)
    ]
    exposed = Exposed("grpc", 16_384, 4096 * MIB, prefill=31.02, alone=12.3456, exposed=1.05)
    limits = WireLimits((12e9,), (3e9, 4e9, 6e9))
    return handoff_table.report_view(
        HandoffReport("m200", "a CPU", (0, 1), 512, "", limits, tuple(rates), (exposed,))
    )


def load_report() -> Report:
    rows = tuple(
        Row(0.0, 0.0, 98.7654, (12.3456, 54.3211), 99.9, output_tokens=3, index=place)
        for place in range(100)
    )
    return Report({}, parse_slos(["ttft:100"]), rows)


def ledger() -> RenderableType:
    attempt = Attempt("disaggregated", "", "prefill-0", "decode-0", "lost", (("queue", 0.5),))
    known = Ledger((("queue", 99.75),), ttft_seconds=99.75, attempts=(attempt, attempt))
    completion = Completion(
        "r", "", (1, 2), (), "length", Usage(3, 0, 2), "local", "short", known, 1.0, 3.0, 1
    )
    return ledger_table(completion)


def status() -> RenderableType:
    load = WorkerLoad(
        running=123, waiting=1234, blocks_total=200, blocks_held=200, tokens_per_second=123_456.7,
        rss_bytes=123 * 2**30,
    )  # fmt: skip
    worker = WorkerStatus("prefill-123", "prefill", 7, "draining", "127.0.0.1:1", load, 1234567)
    pools = (PoolStatus("prefill", 1, (worker,)), PoolStatus("decode", 1, ()))
    decision = ScalingDecision(1.7e9, "prefill", 10, 12, "queue_depth 9 is over its target of 4")
    return status_view(
        ClusterStatus("demo", "ready", pools, (decision,), RouterLoad("router-0"), 1024, 16, "ok"),
        WIDTH,
    )


def profile() -> RenderableType:
    found = simulated.profile()
    costs = replace(
        found.costs, prefill_base_s=0.00218, prefill_token_s=3.12e-5, prefill_token_context_s=4.2e-9
    )
    kinds = [
        f"{step}_{kind}" for step in ("prefill", "decode", "handoff") for kind in ("rms", "most")
    ]
    return profile_view(replace(found, costs=costs, residuals=dict.fromkeys(kinds, 0.123)))


VIEWS: dict[str, Callable[[], RenderableType]] = {
    "bench engine": lambda: engine_report(""),
    "bench engine with a peer": lambda: engine_report("transformers 5.13.1"),
    "bench router": router_report,
    "bench handoff": handoff_report,
    "loadtest run": lambda: report_table(load_report()),
    "loadtest sweep": lambda: sweep_table(Sweep(0.9, ((1234.5, load_report()),))),
    "loadtest compare": lambda: comparison_table(
        load_report(), load_report(), ("a-report-of-monday.json", "a-report-of-tuesday.json")
    ),
    "generate --ledger": ledger,
    "status": status,
    "check": lambda: _memory_table(
        tuple(PoolMemory(pool, 12, 123 * 2**30, 2, 16, 12 * 2**30, 2**17) for pool in POOLS)
    ),
    "demo": lambda: claims_table([Claim("a claim of some words", "123 blocks x 8 bytes", False)]),
    "profile": profile,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_table_is_whole(view: str) -> None:
    file = io.StringIO()
    Console(file=file, width=WIDTH, markup=False, highlight=False).print(VIEWS[view]())
    check(file.getvalue())


POLICY = str(ROOT / "configs/autoscaling/queue-depth.yaml")
TRACE = str(ROOT / "tests/unit/loadtest/traces/mooncake_conversation_60.jsonl")
SPEED = ["--prefill-tokens-per-s", "9000", "--decode-tokens-per-s", "900", "--itl-ms", "30"]
COMMANDS = {
    "plan": ["plan", "llama-3.1-8b", "--trace", TRACE],
    "autoscale explain": ["autoscale", "explain", POLICY, "--metrics", TRACE, *SPEED],
    "simulate --sweep": [
        *("simulate", "--profile", "PROFILE", "--num-requests", "9", "--rate", "9"),
        *("--sweep", "pools=1:1,2:1"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_of_a_command_is_whole(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(simulated.profile().to_json()))
    words = [str(profile) if word == "PROFILE" else word for word in COMMANDS[command]]
    assert run(words) == 0, capsys.readouterr().err
    check(capsys.readouterr().out)


def check(text: str) -> None:
    """Asserts that a text fits, and that no cell is cut."""
    assert text
    assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "…" not in text, text
    for line in text.splitlines():
        # Between the lines of a box, an empty column has had no room.
        assert not re.search(r"[│┃]\s{0,2}[│┃]", line), text
