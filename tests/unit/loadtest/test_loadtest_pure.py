from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.arrivals import arrival_times
from kvrelay.loadtest.lengths import LogNormal, Uniform, parse_lengths
from kvrelay.loadtest.rate import constant
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.statistics import summarize
from kvrelay.loadtest.slo import Slo, parse_slos
from kvrelay.loadtest.workload import Workload
from kvrelay.percentiles import percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SAMPLES)
def test_summaries_are_those_of_numpy_with_percentiles_by_nearest_rank(sample: list[float]) -> None:
    summary = summarize(sample)
    assert summary is not None
    close = {"rel": 1e-9, "abs": 1e-6}
    assert summary.mean == pytest.approx(np.mean(sample), **close)
    assert summary.std == pytest.approx(np.std(sample), **close)
    for name, percent in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
        assert getattr(summary, name) == percentile(sorted(sample), percent)


def test_nothing_has_no_summary() -> None:
    assert summarize([]) is None


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = arrival_times(constant(20.0), burstiness, 20_000, None, Random(1))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # A gamma variable's: mean^2 / shape
    assert np.var(gaps) == pytest.approx(1 / 20**2 / burstiness, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(constant(math.inf), 1.0, 3, None, Random(0)) == [0.0, 0.0, 0.0]


@given(
    rate=st.floats(0.1, 100),
    duration=st.floats(0.1, 5),
    count=st.none() | st.integers(1, 50),
    seed=st.integers(),
)
def test_arrivals_end_at_what_comes_first(
    rate: float, duration: float, count: int | None, seed: int
) -> None:
    times = arrival_times(constant(rate), 1.0, count, duration, Random(seed))
    assert times == sorted(times)
    assert all(0 <= time < duration for time in times)
    assert count is None or len(times) <= count
    longer = arrival_times(constant(rate), 1.0, count, duration * 2, Random(seed))
    assert longer[: len(times)] == times


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("256", Uniform(256, 256)),
        ("32-512", Uniform(32, 512)),
        ("lognormal:median=400,sigma=0.8,min=32,max=2048", LogNormal(400, 0.8, 32, 2048)),
        ("lognormal:sigma=1,median=10", LogNormal(10, 1, 1, 10**8)),
    ],
)
def test_lengths_are_read(text: str, lengths: object) -> None:
    assert parse_lengths(text, "prompt_tokens") == lengths
    assert parse_lengths(str(lengths), "prompt_tokens") == lengths


def test_a_bound_that_nobody_gave_is_not_told() -> None:
    lengths = parse_lengths("lognormal:median=1234567,sigma=1", "prompt_tokens")
    assert str(lengths) == "lognormal:median=1234567,sigma=1,min=1"


def test_few_draws_exceed_the_longest_length() -> None:
    random = Random(3)
    lengths = LogNormal(400, 0.8, 32, 10**6)
    assert sum(lengths.draw(random) > lengths.longest for _ in range(100_000)) < 30
    assert LogNormal(400, 0.8, 32, 2048).longest == 2048
    assert LogNormal(1, 0.1, 32, 2048).longest == 32


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "0",
            "-5",
            "many",
            "5-",
            "9-3",
            "1.5",
            "lognormal:",
            "lognormal:median=4",
            "lognormal:median=0,sigma=1",
        ),
        *("lognormal:median=4,sigma=nan", "lognormal:median=4,sigma=1,mode=3"),
        "lognormal:median=4,sigma=1,min=9,max=3",
        *("lognormal:median=4,sigma=1000", "lognormal:median=1e300,sigma=1"),
    ],
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="prompt_tokens") as caught:
        parse_lengths(text, "prompt_tokens")
    assert "literal" not in caught.value.message, "in words for users"


@given(st.integers(1, 100), st.integers(0, 100), st.integers())
def test_lengths_stay_within_their_bounds(low: int, span: int, seed: int) -> None:
    random = Random(seed)
    for lengths in (Uniform(low, low + span), LogNormal(50, 2.0, low, low + span)):
        assert all(low <= lengths.draw(random) <= low + span for _ in range(20))


def test_a_lognormal_has_its_median() -> None:
    random = Random(3)
    lengths = LogNormal(400, 0.8, 1, 10**6)
    assert np.median([lengths.draw(random) for _ in range(20_000)]) == pytest.approx(400, rel=0.03)


def workload(text: bool = False, seed: int = 5) -> Workload:
    return Workload(constant(10.0), 1.0, 20, None, Uniform(3, 9), Uniform(1, 4), text, seed)


def test_a_seed_plans_the_same_load_again() -> None:
    assert list(workload().plan(100)) == list(workload().plan(100))
    assert list(workload().plan(100)) != list(workload(seed=6).plan(100))


def test_planned_requests_are_within_bounds() -> None:
    plan = list(workload().plan(7))
    assert len(plan) == 20
    assert {token for request in plan for token in request.token_ids or ()} == set(range(7))
    assert all(
        request.prompt is None and 3 <= len(request.token_ids or ()) <= 9 for request in plan
    )
    assert all(1 <= request.output_tokens <= 4 for request in plan)
    for request in workload(text=True).plan(0):
        assert request.token_ids is None
        assert request.prompt is not None
        assert 3 <= len(request.prompt.split()) <= 9


def test_a_load_beyond_the_context_is_refused() -> None:
    workload().check_fits("demo", 13)
    workload().check_fits("demo", 0)
    with pytest.raises(
        InvalidArgument,
        match=r"^--prompt-tokens 3-9 and --output-tokens 1-4 make requests of up to 13 tokens, and "
        r"the context of demo holds 12; give lengths that add up to at most 12$",
    ):
        workload().check_fits("demo", 12)


def test_tpot_leaves_the_first_token_out() -> None:
    assert Row(0.0, 0.0, ttft_s=1.0, e2e_s=3.0, output_tokens=5).tpot_s == 0.5
    assert Row(0.0, 0.0, ttft_s=1.0, e2e_s=1.0, output_tokens=1).tpot_s is None
    assert Row(0.0, 0.0, error="UNAVAILABLE").tpot_s is None


def test_slos_are_read() -> None:
    assert parse_slos(["ttft:200", "tpot:50.5"]) == (Slo("ttft", 200.0), Slo("tpot", 50.5))
    assert parse_slos([]) == ()


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:", "itl:5", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:5ms"]
)
def test_bad_slos_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="goodput"):
        parse_slos([text])


def test_an_slo_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="twice"):
        parse_slos(["e2e:1", "e2e:2"])


def test_slos_are_met_up_to_their_bound() -> None:
    row = Row(0.0, 0.0, ttft_s=0.2, e2e_s=0.3, output_tokens=3)
    assert Slo("ttft", 200.0).met(row)
    assert not Slo("ttft", 199.0).met(row)
    assert Slo("tpot", 51.0).met(row)
    assert not Slo("e2e", 299.0).met(row)


def test_one_token_cannot_miss_a_tpot_and_a_failure_meets_nothing() -> None:
    assert Slo("tpot", 1.0).met(Row(0.0, 0.0, ttft_s=9.0, e2e_s=9.0, output_tokens=1))
    assert not Slo("ttft", 1.0).met(Row(0.0, 0.0))
    failed = Row(0.0, 0.0, error="UNAVAILABLE")
    assert not any(Slo(metric, 1e9).met(failed) for metric in ("ttft", "tpot", "e2e"))


def test_endless_burstiness_is_text() -> None:
    even = Workload(constant(10.0), math.inf, 20, None, Uniform(3, 9), Uniform(1, 4), False, 5)
    assert even.options()["burstiness"] == "inf"
    assert workload().options()["burstiness"] == 1.0
