"""The page: what it says, and that a browser draws it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_page import drawn_page
from support.scripted_router import LEDGER

from kvrelay.loadtest.html_report import compare_page, page, pareto_page
from kvrelay.loadtest.html_report.distributions import BINS, distribution
from kvrelay.loadtest.html_report.phases import segments, ttft_parts
from kvrelay.loadtest.report.latency_names import LONG_NAMES, MEANINGS, SHORT_NAMES
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import PoolSample, Sample, Scaling, Timeline
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.slo import parse_slos
from kvrelay.loadtest.sweep import Sweep

EVIL = "</script><script>document.title = 'stolen'</script>"


def report(rows: int = 30) -> Report:
    random = Random(1)
    found = [
        Row(
            0.1 * n,
            0.001,
            0.02 + random.random() / 50,
            (0.01,) * 5,
            0.1,
            300,
            16,
            6,
            "length",
            "disaggregated",
            "w",
            ledger=LEDGER,
            index=n,
        )
        for n in range(rows)
    ]
    found[3:4] = [Row(0.3, 0.0, error="UNAVAILABLE", message=EVIL, index=3)]
    pools = {name: PoolSample(1, 2, 3, 4, 50, 0.5, 60.0) for name in ("prefill", "decode")}
    samples = tuple(Sample(n / 2, 3, 1, pools) for n in range(8))
    timeline = Timeline(samples, (Scaling(1.5, "decode", 1, 2, EVIL),))
    return Report(
        {"target": "t", "model": EVIL},
        parse_slos(["ttft:30"]),
        tuple(found),
        timeline,
        Reuse(16, 90, 30, 20, 30),
    )


def data(document: str) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" '
        r'id="data">(.*?)</script>',
        document,
        re.DOTALL,
    )
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


SAMPLES = st.lists(st.floats(1e-4, 1e3) | st.floats(-1e300, 1e300), max_size=60)


@given(st.lists(SAMPLES, min_size=1, max_size=2))
def test_a_distribution_holds_every_sample_once(samples: list[list[float]]) -> None:
    found = distribution(samples)
    if not any(samples):
        assert found is None
        return
    assert found is not None
    for run, sample in zip(found["runs"], samples, strict=True):
        assert len(run["bins"]) == BINS
        assert sum(run["bins"]) + run["beyond"] == run["n"] == len(sample)
        assert run["cdf"] == sorted(run["cdf"])
        if sample:
            assert (run["cdf"][0], run["cdf"][-1]) == (
                pytest.approx(min(sample) * 1e3),
                pytest.approx(max(sample) * 1e3),
            )


def test_a_long_tail_gets_a_logarithmic_axis() -> None:
    short, long = distribution([[0.01, 0.02, 0.03]]), distribution([[0.01] * 50 + [5.0] * 5])
    assert short is not None
    assert long is not None
    assert (short["log"], short["low"], long["log"]) == (False, 0.0, True)
    assert 0 < long["low"] < 10


def test_phases_follow_each_other_from_the_arrival_to_the_end() -> None:
    row = Row(2.0, 0.001, ttft_s=0.012, e2e_s=0.05, ledger=LEDGER)
    found = segments(row)
    assert [kind for kind, _, _ in found] == ["send", "queue", "prefill", "handoff", "decode"]
    assert (found[0][1], found[-1][2]) == (2.0, 2.05)
    assert all(before[2] == after[1] for before, after in pairwise(found))
    lengths = {kind: stop - start for kind, start, stop in found}
    assert lengths == pytest.approx(
        {"send": 0.002, "queue": 0.002, "prefill": 0.008, "handoff": 0.001, "decode": 0.037}
    )


def test_without_a_ledger_only_the_first_token_is_known() -> None:
    assert segments(Row(1.0, 0.0, ttft_s=0.5, e2e_s=2.0)) == [
        ("first", 1.0, 1.5),
        ("decode", 1.5, 3.0),
    ]
    assert segments(Row(1.0, 0.0, error="UNAVAILABLE")) == []
    assert ttft_parts([Row(1.0, 0.0, ttft_s=0.5)]) == {}


def test_the_parts_of_the_ttft_add_up_to_it() -> None:
    parts = ttft_parts(
        [Row(0.0, 0.0, ttft_s=0.012, ledger=LEDGER), Row(0.0, 0.0, ttft_s=0.02, ledger=LEDGER)]
    )
    assert math.fsum(parts.values()) == pytest.approx(0.016)
    assert parts["client and network"] == pytest.approx(0.006)


def test_nothing_from_a_target_is_markup() -> None:
    document = page(report())
    assert EVIL not in document
    assert data(document)["runs"][0]["errors"][0]["first"] == EVIL


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    document = page(report())
    assert "default-src 'none'" in document
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", document)
    assert "@import" not in document


def test_reasons_that_differ_in_figures_only_are_one() -> None:
    whys = [
        "1,076 prompt tokens are at least local_below_tokens=64; prefill-1 is free, 0 ms queued",
        "76 prompt tokens are at least local_below_tokens=64; prefill-1 is free, 1.25 s queued",
        "76 prompt tokens are at least local_below_tokens=64; prefill-2 is free, 3 ms queued",
    ]
    rows = [replace(report().rows[0], path="local", why=why) for why in whys]
    assert data(page(replace(report(), rows=tuple(rows))))["runs"][0]["paths"] == [
        [
            "local",
            f"n prompt tokens are at least local_below_tokens=64; {name} is free, n queued",
            n,
        ]
        for name, n in (("prefill-1", 2), ("prefill-2", 1))
    ]


def test_many_requests_are_thinned_and_it_says_so() -> None:
    gantt = data(page(report(rows=1000)))["runs"][0]["gantt"]
    assert gantt["step"] == 5
    assert len(gantt["rows"]) == 200


def test_series_over_time_are_thinned() -> None:
    many = report(rows=5000)
    assert many.timeline is not None
    samples = many.timeline.samples[:1] * 9000
    (run,) = data(page(replace(many, timeline=replace(many.timeline, samples=samples))))["runs"]
    assert 1000 < len(run["dots"]) <= 2000
    assert 1000 < len(run["timeline"]["samples"]) <= 2000


def test_a_sweep_shows_the_run_at_its_goodput() -> None:
    slow = Report({}, parse_slos(["ttft:1"]), report().rows)
    found = data(page(Sweep(0.9, ((1.0, report()), (2.0, slow)))))
    assert found["sweep"]["best"] is None or found["runs"][0]["name"] == "1 requests/s"
    assert [one["rate"] for one in found["sweep"]["runs"]] == [1.0, 2.0]


def test_every_latency_has_a_name_and_a_meaning() -> None:
    keys = list(report().latencies())
    assert list(SHORT_NAMES) == list(LONG_NAMES) == list(MEANINGS) == keys
    assert data(page(report()))["names"] == LONG_NAMES


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """browser(document, width in px) -> what the probe in it found."""
    profile = tmp_path_factory.mktemp("chromium")
    return lambda document, width: drawn_page(document, profile, width)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_a_run(browser: Callable[[str, int], dict[str, Any]], width: int) -> None:
    found = browser(page(report()), width)
    assert found["failed"] is None
    assert found["wide"] == 0  # nothing sticks out sideways
    assert (found["hidden"], found["cut"], found["overlaps"]) == ([], 0, [])
    assert found["title"] == "Load test · kvrelay"
    assert found["plots"] == 4 + 1 + 4 + 1  # distributions, the one timeline, details, Gantt
    assert found["bars"] > 29 * 4
    for words in (
        "29",
        "UNAVAILABLE",
        "Scaling decisions",
        "Gap to token 2",
        "KV held",
        "Utilisation",
        "unlimited cache",
    ):
        assert words in found["text"]
    assert found["lanes"] == [
        "Arrivals per second",
        "TTFT, ms, by arrival, log scale",
        "ITL p95, ms",
        "Requests waiting",
        "Workers",
    ]


def test_a_warning_is_a_sentence(browser: Callable[[str, int], dict[str, Any]]) -> None:
    found = browser(page(replace(report(), interrupted=True)), 1280)
    assert len(found["banners"]) == 1
    assert found["banners"][0].startswith("Interrupted: 30 requests were sent")
    assert found["banners"][0].endswith("were answered or failed.")


def test_a_browser_draws_comparisons_and_sweeps(
    browser: Callable[[str, int], dict[str, Any]],
) -> None:
    bare = Report({}, (), (Row(0.0, 0.0, ttft_s=0.1, e2e_s=0.2, itl_s=(0.1,), output_tokens=2),))
    found = browser(compare_page((report(), bare), ("old", EVIL)), 1280)
    assert (found["failed"], found["wide"], found["title"]) == (None, 0, "Comparison · kvrelay")
    found = browser(page(Sweep(0.9, ((1.0, report()), (2.0, bare), (16.0, bare)))), 390)
    assert (found["failed"], found["wide"], found["title"]) == (None, 0, "Sweep · kvrelay")
    assert "Goodput" in found["text"]
    empty = browser(page(Report({}, (), (), interrupted=True)), 390)
    assert (empty["failed"], empty["wide"]) == (None, 0)


P99 = {"median": 0.1, "p99": 0.2}


def swept(itl: dict[str, float] | None, pareto: bool = True, **more: object) -> dict[str, Any]:
    """A point of a sweep of simulations, as plain data."""
    return {
        "values": {},
        "good_share": 0.5,
        "cached_share": 0.1,
        "requests": 10,
        "failed": 0,
        "latencies": {"TTFT": P99, "ITL": itl},
        "pareto": pareto,
        **more,
    }


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_a_sweep_of_simulations(
    browser: Callable[[str, int], dict[str, Any]], width: int
) -> None:
    points = [
        swept(
            name=f"{EVIL} {n}",
            goodput=1.5 * n,
            cost=1.0 + n // 2,
            itl=None if n == 2 else P99,
            pareto=n % 2 == 1,
        )
        for n in range(6)
    ]
    found = browser(pareto_page({"points": points, "options": {}}), width)
    assert found["failed"] is None
    assert (found["wide"], found["hidden"], found["cut"], found["overlaps"]) == (0, [], 0, [])
    assert found["title"] == "Simulated clusters · kvrelay"
    assert found["plots"] == 2
    plain, best = "var(--plain)", "var(--run0)"
    goodput, latencies = found["dots"]
    assert goodput == [plain] * 3 + [best] * 3, "no winner is under another dot"
    assert latencies == [plain] * 2 + [best] * 3, "a point without ITL has no place"
    assert "Generated by kvrelay simulate." in found["text"]


def test_the_axes_of_a_sweep_show_small_differences(
    browser: Callable[[str, int], dict[str, Any]],
) -> None:
    points = [swept(name=str(n), goodput=90.0 + n, cost=40.0 + n, itl=P99) for n in range(3)]
    found = browser(pareto_page({"points": points, "options": {}}), 1280)
    goodput, _ = found["marks"]
    assert "0" not in goodput
