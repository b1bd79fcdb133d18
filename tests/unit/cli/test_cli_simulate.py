"""`kvrelay simulate` as a user runs it: its files, its exit codes, and bad input in one line."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import simulated

from kvrelay.cli.main import run
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.report_file import load_report
from kvrelay.simulation.options import MAX_POINTS, parse_failures, parse_pool, parse_sweep
from kvrelay.simulation.scenario import MAX_WORKERS
from kvrelay.simulation.sweep import SweepPoint, pareto

COUNT = ("--rate", "20", "--num-requests", "12")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,4\n"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(simulated.profile().to_json()))
    return str(file)


def test_a_run_is_saved_as_a_load_test_and_compared(
    tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        arguments = ("--goodput", "ttft:500", "--json", str(file), "--html", f"{file}.html")
        assert run(["simulate", "--profile", profile, *COUNT, *arguments]) == 0
    first, second = map(load_report, files)
    assert first == second
    assert len(first.answered) == 12
    assert first.options["simulated"] is True
    assert first.timeline is not None
    assert run(["loadtest", "report", str(files[0])]) == 0
    assert run(["loadtest", "compare", *map(str, files)]) == 0
    assert "12 of 12 requests answered" in capsys.readouterr().out


def test_a_sweep_writes_all_points_and_a_page(tmp_path: Path, profile: str) -> None:
    file, html = tmp_path / "sweep.json", tmp_path / "sweep.html"
    arguments = ["--sweep", "pools=0:1,1:1,1:2", "--sweep", "kv.block_size=16,32"]
    written = ["--json", str(file), "--html", str(html)]
    assert run(["simulate", "--profile", profile, *COUNT, *arguments, *written]) == 0
    document = json.loads(file.read_text())
    assert [point["values"] for point in document["points"]] == [
        {"pools": pools, "kv.block_size": size}
        for pools in ("0:1", "1:1", "1:2")
        for size in ("16", "32")
    ]
    assert [round(point["cost"]) for point in document["points"]] == [1, 1, 2, 2, 3, 3]
    assert any(point["pareto"] for point in document["points"])
    assert "paretoPlot" in html.read_text()


def test_a_sweep_fits_a_usual_terminal(
    profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--sweep", "pools=0:1,1:1", "--sweep", "prefill.chunk_tokens=256,512"]
    assert run(["simulate", "--profile", profile, *COUNT, *arguments]) == 0
    shown = capsys.readouterr().out
    for pools in ("0:1", "1:1"):
        for tokens in (256, 512):
            assert f"pools={pools} prefill.chunk_tokens={tokens}" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_wrong_point_stops_a_sweep_before_its_first_simulation(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a simulation ran")

    monkeypatch.setattr("kvrelay.simulation.simulation.simulate", fail)
    arguments = ["--sweep", "router.policy=kv_aware,best"]
    assert run(["simulate", "--profile", profile, *COUNT, *arguments]) == 1


def test_unlike_workers_share_a_pool(tmp_path: Path, profile: str) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(simulated.profile(decode_base_s=0.05).to_json()))
    file = tmp_path / "run.json"
    pools = ["--decode", "1", "--decode", f"1:{slow}"]
    assert run(["simulate", "--profile", profile, *COUNT, *pools, "--json", str(file)]) == 0
    tpots = sorted(row.tpot_s or 0.0 for row in load_report(file).rows)
    # The decode step of either worker takes its own base and little more.
    assert tpots[0] < 0.02
    assert tpots[-1] > 0.05


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--profile", "PROFILE", "--decode", "x"], 2, "--decode 'x'"),
        (["--profile", "PROFILE", "--decode", "-1"], 2, "--decode '-1'"),
        (["--profile", "PROFILE", "--decode", "9" * 50], 2, "--decode"),
        (["--profile", "PROFILE", "--decode", "0"], 1, "needs a decode worker"),
        (["--profile", "PROFILE", "--decode", "10001"], 2, "from 0 to 10000"),
        (["--profile", "PROFILE", "--decode", "6000", "--prefill", "6000"], 1, "too many"),
        (["--decode", "1"], 1, "no profile"),
        (["--profile", "missing.json"], 2, "missing.json"),
        (["--profile", "."], 1, "directory"),
        (["--profile", "PROFILE", "-c", "missing.yaml"], 1, "missing.yaml"),
        (["--profile", "PROFILE", "--fail", "decode-0"], 2, "WORKER@SECONDS"),
        (["--profile", "PROFILE", "--fail", "decode-0@nan"], 2, "WORKER@SECONDS"),
        (["--profile", "PROFILE", "--fail", "decode-7@1"], 1, "no such worker"),
        (["--profile", "PROFILE", "--sweep", "pools"], 2, "KEY=VALUE"),
        (["--profile", "PROFILE", "--sweep", "policy=x"], 2, "'policy' is unknown"),
        (["--profile", "PROFILE", "--sweep", "pools=1"], 1, "PREFILL:DECODE"),
        (["--profile", "PROFILE", "--sweep", "router.policy=best"], 1, "router.policy"),
        (["--profile", "PROFILE", "--sweep", "kv.nothing=1"], 1, "kv.nothing"),
        (["--profile", "PROFILE", "--sweep", "rate=0"], 1, "sends no request"),
        (["--profile", "PROFILE", "--sweep", "rate=1", "--trace", "TRACE"], 1, "--trace"),
        (["--profile", "PROFILE", "--rate", "x"], 2, "--rate"),
        (["--profile", "PROFILE", "--trace", "PROFILE"], 2, "--trace takes a trace"),
        (["--profile", "PROFILE", "--trace", "HOLES"], 1, "two lengths"),
        (["--profile", "PROFILE", "--prompt-tokens", "9000"], 1, "no prompt fits"),
        (["--profile", "PROFILE", "--routers", "2"], 1, "2 routers"),
        (["--profile", "PROFILE", "--time-scale", "2"], 2, "require --trace"),
        (["--profile", "PROFILE", "--trace-start", "2"], 2, "requires --trace"),
        (["--profile", "/dev/zero"], 1, "not a profile"),
        (["--profile", "PROFILE", "--json", "no/folder/x.json"], 2, "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    code: int,
    reason: str,
    profile: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    holes = tmp_path / "holes.csv"
    holes.write_text(TRACE + "2023-11-16 18:15:47.0000000,,\n")
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    files = {"PROFILE": profile, "HOLES": str(holes), "TRACE": str(trace)}
    load = () if "--trace" in arguments or "--rate" in arguments else ("--num-requests", "5")
    try:
        found = run(["simulate", *load, *(files.get(one, one) for one in arguments)])
    except SystemExit as error:
        found = int(error.code or 0)
    lines = [one for one in capsys.readouterr().err.splitlines() if one.startswith("kvrelay:")]
    assert found == code, lines
    assert len(lines) == 1
    assert reason in lines[0]


TEXTS = st.text(alphabet="0123456789:@=,.-pooldcertfikv é", max_size=20)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(InvalidArgument):
        assert all(0 <= part.count <= MAX_WORKERS for part in parse_pool([text], "--x"))
    with suppress(InvalidArgument):
        assert all(0 <= failure.at_s < math.inf for failure in parse_failures([text]))
    with suppress(InvalidArgument):
        assert 1 <= len(parse_sweep([text])) <= MAX_POINTS


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_no_point_beats_a_pareto_point(figures: list[tuple[int, int]]) -> None:
    points = [
        SweepPoint(str(n), (), float(goodput), float(cost), 1.0, 0.0, 1, 0, {})
        for n, (goodput, cost) in enumerate(figures)
    ]
    best = pareto(points)

    def beats(one: SweepPoint, other: SweepPoint) -> bool:
        no_worse = one.goodput >= other.goodput and one.cost <= other.cost
        return no_worse and (one.goodput, one.cost) != (other.goodput, other.cost)

    assert best
    for point in points:
        beaten = any(beats(one, point) for one in points)
        assert (point in best) is not beaten, "equal points are all in it, or none"


@settings(max_examples=10, deadline=None)
@given(st.integers(8192, 10**8), st.integers(0, 10**8))
def test_prompts_that_no_context_holds_are_refused_before_they_are_made(
    low: int, more: int
) -> None:
    file = Path(mkdtemp()) / "profile.json"
    file.write_text(json.dumps(simulated.profile().to_json()))
    length = f"{low}-{min(10**8, low + more)}"
    assert run(["simulate", "--profile", str(file), *COUNT, "--prompt-tokens", length]) == 1
    file.unlink()
    file.parent.rmdir()


@pytest.mark.parametrize("option", [("--rate", "1e300"), ("--prompt-tokens", str(2**40))])
def test_numbers_without_bounds_are_usage_errors(profile: str, option: tuple[str, str]) -> None:
    assert run(["simulate", "--profile", profile, "--num-requests", "2", *option]) == 2


def test_a_memory_of_the_machine_is_refused_in_one_line(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "--profile", profile, *COUNT, "--sweep", "kv.memory=auto"]) == 1
    error = capsys.readouterr().err
    assert "is auto, which depends on the machine" in error
    assert error.count("\n") == 1
