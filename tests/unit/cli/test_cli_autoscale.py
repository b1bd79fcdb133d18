from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import simulated

from kvrelay.cli.main import run
from kvrelay.cli.views.autoscale_view import clock, sparkline

POLICY = "configs/autoscaling/queue-depth.yaml"
TRACE = ["--prefill-tokens-per-s", "1000", "--decode-tokens-per-s", "200", "--itl-ms", "20"]


@pytest.fixture
def policy() -> str:
    return str(Path(__file__).parents[3] / POLICY)


@pytest.fixture
def azure(tmp_path: Path) -> str:
    """A minute of quiet, one of ten requests per second, three of quiet."""
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:15:{at:02}.0,500,20" for at in (0, 20, 40)]
    rows += [f"2023-11-16 18:16:{at // 10:02}.{at % 10},500,20" for at in range(600)]
    rows += [f"2023-11-16 18:{minute}:00.0,500,20" for minute in (17, 18, 19, 20)]
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(rows) + "\n")
    return str(file)


def test_a_trace_flows_through_a_model_in_which_sizes_have_their_effect(
    policy: str, azure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["autoscale", "explain", policy, "--metrics", azure, *TRACE, "--json"]) == 0
    verdicts = [
        one for one in json.loads(capsys.readouterr().out)["verdicts"] if one["pool"] == "prefill"
    ]
    sizes = [one["after"] for one in verdicts]
    assert sizes[:60] == [1] * 60
    assert max(sizes) == 4
    assert sizes[-1] < 4, "the queue is gone, so the pool shrinks"
    assert max(one["metrics"]["queue_depth"] for one in verdicts) > 10
    assert verdicts[-1]["metrics"]["queue_depth"] == pytest.approx(0, abs=1e-6)


def test_the_table_gives_each_change_its_reason(
    policy: str, azure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["autoscale", "explain", policy, "--metrics", azure, *TRACE]) == 0
    out = capsys.readouterr().out
    assert "over 1 worker / target" in out
    assert "1 → " in out
    assert "worker-hours" in out


def test_a_csv_of_metrics_is_replayed_as_it_is(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.csv"
    rows = "".join(f"{at},decode,1,1,{20 if at > 3 else 0}\n" for at in range(12))
    file.write_text("seconds,pool,size,ready,queue_depth\n" + rows)
    assert run(["autoscale", "explain", policy, "--metrics", str(file), "--json"]) == 0
    sizes = [one["after"] for one in json.loads(capsys.readouterr().out)["verdicts"]]
    assert sizes == [1] * 9 + [3] * 3


def test_it_says_what_a_csv_without_the_utilisation_leaves_out(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.csv"
    for header, busy, after, is_known in (
        ("", "", 1, False),
        (",busy_share", ",0.9", 3, True),
        (",busy_share", ",", 1, False),
    ):
        rows = "".join(f"{at},decode,3,3,0,0.1{busy}\n" for at in range(0, 600, 10))
        file.write_text(f"seconds,pool,size,ready,queue_depth,kv_occupancy{header}\n{rows}")
        assert run(["autoscale", "explain", policy, "--metrics", str(file), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["verdicts"][-1]["after"] == after
        assert ("without busy_share of decode" in found["note"]) != is_known


def test_it_says_that_it_leaves_out_slo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worker.json").write_text(json.dumps(simulated.profile().to_json()))
    rules = tmp_path / "policy.yaml"
    rules.write_text(
        "profile: worker.json\ndecode: {max_replicas: 3, metrics: [{name: queue_depth, target: 4}, "
        "{name: slo, itl_ms: 20}]}\n"
    )
    file = tmp_path / "metrics.csv"
    file.write_text("seconds,pool,size,ready,queue_depth\n0,decode,1,1,0\n")
    assert run(["autoscale", "explain", str(rules), "--metrics", str(file), "--json"]) == 0
    note = json.loads(capsys.readouterr().out)["note"]
    assert "without the metric slo of decode, which `kvrelay simulate --autoscaling` knows" in note


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics", "absent.csv"], "No such file"),
        (["--metrics", "LICENSE"], "is a trace; give --prefill-tokens-per-s"),
        (["--metrics", "LICENSE", *TRACE], "the format is unknown"),
        (["--metrics", POLICY], "is an autoscaling policy, and --metrics takes"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    policy: str,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert run(["autoscale", "explain", policy, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_figures_of_a_worker_are_for_traces(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("seconds,pool,size,ready,queue_depth\n0,decode,1,1,0\n")
    assert run(["autoscale", "explain", policy, "--metrics", str(file), *TRACE]) == 2
    assert "contains recorded metrics" in capsys.readouterr().err


def test_bars_go_from_nothing_to_the_largest() -> None:
    assert sparkline([0, 1, 2, 4, float("nan")]) == " ▂▄█·"
    assert len(sparkline(list(range(1000)))) == 96
    assert sparkline([]) == ""
    assert clock(93784) == "1d 02:03:04"
