from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.scripted_router import LEDGER

from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.loadtest.counters import PrefixCache
from kvrelay.loadtest.report.report_file import load, load_report, save
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import PoolSample, Sample, Scaling, Timeline
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.slo import parse_slos
from kvrelay.loadtest.sweep import Sweep

ROWS = (
    Row(0.0, 0.001, 0.1, (0.05, 0.05), 0.2, 10, 4, 3, "length", "disaggregated", "policy"),
    Row(
        1.0,
        0.002,
        0.3,
        (0.1,),
        0.4,
        20,
        0,
        2,
        "stop",
        "local",
        "short",
        ledger=LEDGER,
        request_id="r",
    ),
    Row(1.5, 0.003, 0.5, (), 0.5, 30, 0, 1, "length", "disaggregated", "policy"),
    Row(1.8, 0.004, output_tokens=7, error="RESOURCE_EXHAUSTED", message="full"),
)
TIMELINE = Timeline(
    samples=(Sample(0.5, 1, 2, {"prefill": PoolSample(1, 2, 3, 4, 5, 0.5, 6.0)}),),
    decisions=(Scaling(0.4, "prefill", 1, 2, "queue_depth"),),
    missed=1,
)
REUSE = Reuse(16, 60, 20, 10, 4, PrefixCache(4, 60))
REPORT = Report({"rate": 2.0}, parse_slos(["ttft:300", "tpot:60"]), ROWS, TIMELINE, REUSE)


def test_rates_count_what_was_answered() -> None:
    assert REPORT.duration_s == 2.0
    assert REPORT.rates() == {
        "requests": 1.5,
        "output tokens": 3.0,
        "prompt tokens": 30.0,
        "goodput requests": 0.5,
    }


def test_latencies_are_pooled_as_they_should_be() -> None:
    latencies = REPORT.latencies()
    medians = {name: summary and summary.median for name, summary in latencies.items()}
    assert medians == pytest.approx(
        {
            "TTFT": 0.3,
            "second token gap": 0.05,
            "ITL": 0.05,
            "TPOT": 0.05,
            "E2E": 0.4,
            "late start": 0.002,
        }
    )


def test_errors_and_paths_are_counted() -> None:
    assert REPORT.errors == {"RESOURCE_EXHAUSTED": 1}
    assert REPORT.paths == {"disaggregated": 2, "local": 1}


@pytest.mark.parametrize("first", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_the_order_of_errors_does_not_depend_on_which_came_first(first: str) -> None:
    codes = sorted(["UNAVAILABLE", "RESOURCE_EXHAUSTED"], key=lambda code: code != first)
    rows = tuple(Row(1.0, 0.0, error=code) for code in [*codes, "INTERNAL", "INTERNAL"])
    report = Report({}, (), rows)
    assert list(report.errors) == ["INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE"]


def test_nothing_answered_divides_by_nothing() -> None:
    report = Report({}, (), ROWS[3:])
    assert (report.duration_s, set(report.rates().values()), set(report.latencies().values())) == (
        0.0,
        {0.0},
        {None},
    )


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    save(REPORT, file)
    assert load_report(file) == REPORT
    document = json.loads(file.read_text())
    assert document["latencies_seconds"]["TTFT"]["median"] == pytest.approx(0.3)
    assert document["requests"][3]["error"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other"}',
        '{"format": "kvrelay-loadtest-1", "options": {}, "slos": [{}]}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"other\.json: not a report"):
        load_report(file)
    # No library's words.
    if not text.startswith('{"format"'):
        with pytest.raises(InvalidArgument, match="give a file that `run --json` or"):
            load_report(file)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent\.json: No such file"):
        load_report(tmp_path / "absent.json")
    with pytest.raises(FailedPrecondition, match="cannot be written: No such file"):
        save(REPORT, tmp_path / "absent" / "report.json")


def test_a_saved_sweep_is_read_back(tmp_path: Path) -> None:
    sweep, file = (
        Sweep(0.9, ((1.0, REPORT), (2.0, replace(REPORT, interrupted=True)))),
        tmp_path / "sweep.json",
    )
    save(sweep, file)
    assert load(file) == sweep
    with pytest.raises(InvalidArgument, match=r"sweep\.json: the file is a sweep"):
        load_report(file)


def late(late_s: float, ttft_s: float) -> Report:
    return Report({}, (), tuple(Row(0.0, late_s, ttft_s=ttft_s, e2e_s=ttft_s) for _ in range(10)))


def test_a_generator_that_is_the_bottleneck_says_so() -> None:
    assert not late(0.009, 0.02).warnings  # nobody's bottleneck
    assert not late(0.02, 1.0).warnings  # 2 % of what was measured
    (warning,) = late(0.02, 0.2).warnings
    assert warning.startswith("the load generator was late: p99 20 ms")
    assert warning.endswith("lower the rate.")


def test_what_was_cut_interrupted_or_missed_is_said() -> None:
    cut = {"cut": {"requests": 3, "tokens": 50, "of_tokens": 1000}}
    report = Report(cut, (), ROWS, TIMELINE, interrupted=True)
    assert [one.split(":")[0].split(" ")[0] for one in report.warnings] == [
        "interrupted",
        "3",
        "the",
    ]
    assert "5.0%" in report.warnings[1]
    assert not Report({"cut": {"requests": 0, "tokens": 0, "of_tokens": 9}}, (), ROWS).warnings


def test_a_dead_targets_time_counts() -> None:
    rows = (*ROWS[:3], Row(59.0, 0.0, e2e_s=1.0, error="UNAVAILABLE"))
    report = Report({}, (), rows)
    assert (report.duration_s, report.rates()["requests"]) == (60.0, 3 / 60)


def test_what_is_no_json_is_not_written_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with pytest.raises(ValueError, match="JSON"):
        save(replace(REPORT, options={"burstiness": math.inf}), file)
    save(REPORT, file)
    file.write_text(file.read_text().replace('"rate": 2.0', '"rate": Infinity'))
    with pytest.raises(InvalidArgument, match="Infinity is not valid JSON"):
        load(file)


def test_prompts_that_were_cached_before_the_test_are_told() -> None:
    (warning,) = Report({}, (), ROWS, reuse=Reuse(16, 1000, 100, 90, 200)).warnings
    assert warning.startswith("20.0% of the prompt tokens came from a cache")
    assert "10.0%: prompts were cached before the test; use another --seed" in warning
    assert not Report({}, (), ROWS, reuse=Reuse(16, 1000, 100, 90, 105)).warnings
