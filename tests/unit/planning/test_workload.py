"""Recordings: their rate, their variability, their sample of lengths."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.workload import MAX_LENGTHS, Workload, check_lengths, recorded


def poisson(rate: float, seconds: float) -> list[float]:
    random, at, times = Random(3), 0.0, []
    while at < seconds:
        times.append(at)
        at += random.expovariate(rate)
    return times


def of(times: list[float]) -> Workload:
    return recorded(times, [(100, 10)] * len(times), "the trace")


def test_poisson_arrivals_have_an_scv_of_1() -> None:
    found = of(poisson(5, 3000))
    assert found.mean_rate == pytest.approx(5, rel=0.05)
    # The busiest of many minutes.
    assert 5 < found.rate < 7
    assert found.arrival_scv == pytest.approx(1, rel=0.3)


def test_even_arrivals_have_an_scv_of_0() -> None:
    found = of([n / 4 for n in range(1000)])
    assert found.rate == pytest.approx(4, rel=0.01)
    assert found.arrival_scv == pytest.approx(0, abs=1e-9)


def test_the_busiest_minute_sets_the_rate() -> None:
    times = [*range(0, 600, 10), *(600 + n / 10 for n in range(600)), *range(660, 1200, 10)]
    assert of([float(at) for at in times]).rate == pytest.approx(10, rel=0.02)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=60), st.floats(0.001, 1e3))
def test_a_given_rate_is_taken_for_any_times(times: list[float], rate: float) -> None:
    found = recorded(sorted(times), [(5, 5)] * len(times), "x", rate)
    assert (found.rate, found.mean_rate) == (rate, rate)
    assert found.arrival_scv >= 0


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_any_times_have_a_rate_or_are_refused(times: list[float]) -> None:
    try:
        found = of(sorted(times))
    except FailedPrecondition:
        return
    assert found.rate > 0
    assert found.mean_rate > 0


def test_a_hole_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="no request from second 99 on for 401 s"):
        of([float(n) for n in [*range(100), *range(500, 600)]])


def test_short_gaps_are_none() -> None:
    assert of([float(n) for n in [*range(30), *range(250, 280)]]).rate > 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=30))
def test_a_sample_keeps_the_extremes(lengths: list[tuple[int, int]]) -> None:
    many = lengths * (2 * MAX_LENGTHS // len(lengths))
    kept = check_lengths(many, "x")
    assert len(kept) <= MAX_LENGTHS
    assert max(kept)[0] == max(lengths)[0]
    assert min(kept)[0] == min(lengths)[0]
    assert all(answer >= 1 for _, answer in kept)


def test_the_context_is_weighted_by_the_answers() -> None:
    """One request holds 100 tokens for 1 step, another about 10 for 99 steps."""
    mean, _ = Workload(1, 1, 1, ((100, 1), (10, 99))).context()
    assert mean == pytest.approx((1 * 100.5 + 99 * 59.5) / 100)
