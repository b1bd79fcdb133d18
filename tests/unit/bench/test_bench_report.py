from __future__ import annotations

import json

import pytest
from rich.console import Console

from kvrelay.bench.cases import DecodeCase, PrefillCase, all_cases
from kvrelay.bench.cost import ModelCost
from kvrelay.bench.engine_bench import Measured
from kvrelay.bench.limits import Limits
from kvrelay.bench.report import EngineReport
from kvrelay.bench.table import report_view

COST = ModelCost(
    16,
    16,
    4,
    64,
    body=180_355_072,
    head=8_388_608,
    max_model_len=8192,
    vocab_size=8192,
    dtype="bfloat16",
)
LIMITS = Limits(1, {"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}, bandwidth=2e10)


def report(*names: str, weights: str = "bfloat16") -> EngineReport:
    """Each case takes twice its least time on the first engine, three times on the next."""
    blank = EngineReport("m200", "a CPU", "cpu", (0,), LIMITS, COST, weights, 512, {}, ())
    cases = (*all_cases().prefill, *all_cases().decode)
    times = enumerate(names, start=2)
    factors = {name: factor for factor, name in times}
    return EngineReport(
        "m200",
        "a CPU",
        "cpu",
        (0,),
        LIMITS,
        COST,
        weights,
        512,
        {name: {"name": name, "ready_seconds": 1.5} for name in names},
        tuple(
            Measured(
                case,
                {
                    name: (factor * blank.bound(case).seconds,) * 3
                    for name, factor in factors.items()
                },
            )
            for case in cases
        ),
    )


def test_the_bound_is_the_larger_of_compute_and_memory() -> None:
    one = report("kvrelay")
    prompt = one.bound(PrefillCase(1024))
    assert prompt.name == "compute"
    assert prompt.seconds == prompt.compute_seconds > prompt.memory_seconds
    step = one.bound(DecodeCase(1, 128))
    assert step.name == "memory"
    assert step.seconds == step.memory_seconds == (2 * 188_743_680 + 128 * 16384) / 2e10
    # Without matrix units a large batch is arithmetic
    assert one.bound(DecodeCase(32, 128)).name == "compute"


def test_int8_weights_have_limits_of_their_own() -> None:
    full, half = report("kvrelay"), report("kvrelay", weights="int8")
    case = PrefillCase(512)
    assert half.bound(case).compute_seconds == full.bound(case).compute_seconds / 2


def test_shares_and_ratios_in_json() -> None:
    found = json.loads(json.dumps(report("kvrelay", "vLLM 1.0").as_dict()))
    assert [row["tokens"] for row in found["prefill"]] == [128, 512, 1024, 2048, 4096]
    assert [(row["batch"], row["context"]) for row in found["decode"]][:5] == [
        (1, 128), (4, 128), (16, 128), (32, 128), (1, 1024),
    ]  # fmt: skip
    for row in (*found["prefill"], *found["decode"]):
        ours = row["engines"]["kvrelay"]
        assert ours["share"] == pytest.approx(0.5)
        assert max(ours["compute_share"], ours["memory_share"]) == ours["share"]
        assert row["ratio"] == pytest.approx(1.5)
        assert row["bound"] in ("compute", "memory")
        assert ours["seconds"] == pytest.approx(2 * row["limit_seconds"])
        assert len(ours["runs"]) == 3
    first = found["prefill"][0]["engines"]["kvrelay"]
    assert first["tokens_per_second"] == pytest.approx(128 / first["seconds"])
    assert found["fits"]["kvrelay"]["prefill_growth"] > 1
    assert found["fits"]["vLLM 1.0"]["decode"]["r2"] > 0.9
    assert found["limits"]["bandwidth"] == 2e10


def test_without_a_peer_there_is_no_ratio() -> None:
    found = report("kvrelay").as_dict()
    assert {row["ratio"] for row in (*found["prefill"], *found["decode"])} == {None}


def shown(one: EngineReport) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(report_view(one))
    return capture.get()


def test_tables_name_the_peer_the_bound_and_both_shares() -> None:
    text = shown(report("kvrelay", "vLLM 1.0"))
    assert "\n 4096 " in text
    assert "\n 32 x 1024 " in text
    cells = next(line.split() for line in text.splitlines() if line.startswith(" 1024 "))
    compute = report("kvrelay").bound(PrefillCase(1024)).compute_seconds
    assert cells[1] == f"{2 * compute * 1000:.1f}"
    assert cells[3:5] == [f"{3 * compute * 1000:.1f}", "1.50"]
    assert cells[6:8] == ["compute", "50%"]
    assert "vLLM 1.0: 1.5 s from start to first token" in text
    assert "R²" in text


def test_tables_without_a_peer_have_no_column_for_one() -> None:
    text = shown(report("kvrelay"))
    assert "ratio" not in text
    assert "share" in text
