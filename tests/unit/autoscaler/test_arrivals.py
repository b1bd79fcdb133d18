"""The expected rate: exact on even loads, near on random ones, and never below what is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.arrivals import Arrivals
from kvrelay.types.control_plane import RouterLoad

WINDOW_S, AHEAD_S = 30.0, 20.0
Count = Callable[[float], int]


def seen(count: Count, end: float, step: float = 1.0, routers: int = 1) -> Arrivals:
    """Arrivals that saw the counts of equal routers until `end`."""
    arrivals, now = Arrivals(WINDOW_S), 0.0
    while now <= end:
        loads = [RouterLoad(f"router-{n}", admitted=count(now)) for n in range(routers)]
        arrivals.seen(loads, now)
        now += step
    return arrivals


@given(
    rate=st.floats(0, 10_000), step=st.sampled_from([0.1, 1.0, 2.0, 7.0]), routers=st.integers(1, 3)
)
def test_an_even_load_is_expected_to_go_on(rate: float, step: float, routers: int) -> None:
    arrivals = seen(lambda now: int(rate * now), 120, step, routers)
    for found in (arrivals.rate(), arrivals.rate(AHEAD_S), arrivals.recent_rate(10)):
        # A count may be off by one at both ends.
        assert found == pytest.approx(rate * routers, abs=0.2 * routers, rel=0.01)


@given(slope=st.floats(0.05, 5))
def test_a_rising_load_is_expected_to_rise(slope: float) -> None:
    end = 120.0
    arrivals = seen(lambda now: int(slope * now**2 / 2), end)
    now, then = slope * end, slope * (end + AHEAD_S)
    expected = arrivals.rate(AHEAD_S)
    assert expected is not None
    # Less the standard error of the slope, which matters for a slow rise.
    assert (1.03 if slope > 1 else 0.9) * now < expected <= 1.01 * then + 0.5


def test_a_falling_load_is_not_expected_to_fall() -> None:
    arrivals = seen(lambda now: int(10 * now if now < 60 else 600 + 2 * (now - 60)), 70)
    assert arrivals.rate(AHEAD_S) == arrivals.rate()
    assert arrivals.rate() == pytest.approx((20 * 10 + 10 * 2) / 30, rel=0.05)
    assert arrivals.recent_rate(10) == pytest.approx(2)


@pytest.mark.parametrize("rate", [1.0, 5.0, 50.0])
def test_noise_is_seldom_a_trend(rate: float) -> None:
    rng, arrivals, total, found = random.Random(7), Arrivals(WINDOW_S), 0, []
    for now in range(4000):
        total += poisson(rng, rate)
        arrivals.seen([RouterLoad("router-0", admitted=total)], float(now))
        found.append(arrivals.rate(AHEAD_S) or 0.0)
    assert sum(found) / len(found) == pytest.approx(rate, rel=0.15)
    assert sum(one > 1.8 * rate + 1 for one in found) < 0.02 * len(found)


def poisson(rng: random.Random, mean: float) -> int:
    number, at = -1, 0.0
    while at < 1:
        at, number = at + rng.expovariate(mean), number + 1
    return number


def test_a_rate_needs_some_seconds() -> None:
    arrivals = Arrivals(WINDOW_S)
    assert arrivals.rate() is arrivals.recent_rate(10) is None
    arrivals.seen([RouterLoad("router-0", admitted=1000)], 0.0)
    assert arrivals.rate() is arrivals.recent_rate(10) is None
    arrivals.seen([RouterLoad("router-0", admitted=1010)], 2.0)
    assert arrivals.rate() is None
    assert arrivals.recent_rate(10) == 5
    arrivals.seen([RouterLoad("router-0", admitted=1030)], 6.0)
    assert arrivals.rate() == pytest.approx(5)


def test_routers_that_come_go_and_start_again_are_no_arrivals() -> None:
    arrivals = Arrivals(WINDOW_S)
    steps = [
        {"a": 10**6},
        {"a": 10**6 + 10, "b": 5000},
        {"a": 10**6 + 20, "b": 5000},
        {"b": 5010},
        # It has started again.
        {"b": 0, "a": 10**7},
        {"b": 10, "a": 10**7},
    ]
    for number, counts in enumerate(steps):
        arrivals.seen(
            [RouterLoad(name, admitted=one) for name, one in counts.items()], 2.0 * number
        )
    assert arrivals.recent_rate(10) == pytest.approx(40 / 10)


@given(st.lists(st.tuples(st.floats(0.1, 60), st.integers(0, 2**63 - 1)), min_size=1, max_size=200))
def test_any_counts_give_a_rate_and_a_bounded_memory(steps: list[tuple[float, int]]) -> None:
    arrivals, now = Arrivals(WINDOW_S), 0.0
    times = []
    for seconds, count in steps:
        now += seconds
        times.append(now)
        arrivals.seen([RouterLoad("router-0", admitted=count)], now)
        rate = arrivals.rate(AHEAD_S)
        assert rate is None or 0 <= rate < float("inf")
    longest = max(after - before for before, after in pairwise([0, *times]))
    assert all(at >= now - WINDOW_S - longest for at, _ in arrivals._counts)
