"""The expected rate: exact on even loads, near on random ones, and never below what is seen."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.poisson import poisson

from autoscaler.arrivals import Arrivals
from kvrelay.types.control_plane import RouterLoad

WINDOW_S, AHEAD_S, GAP_S = 30.0, 20.0, 60.0
Count = Callable[[float], int]


def seen(count: Count, end: float, step: float = 1.0, routers: int = 1) -> Arrivals:
    """Arrivals that saw the counts of equal routers until `end`."""
    arrivals, now = Arrivals(WINDOW_S, GAP_S), 0.0
    while now <= end:
        loads = [RouterLoad(f"router-{n}", begun=count(now)) for n in range(routers)]
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
    # Less the standard error of the slope. For a slow rise, the mean of the window remains.
    least = 1.03 * now if slope > 1 else 0.97 * slope * (end - WINDOW_S / 2) - 0.1
    assert least < expected <= 1.01 * then + 0.5


@given(slope=st.floats(0.2, 5))
def test_a_falling_load_counts_as_it_is(slope: float) -> None:
    end = 120.0
    arrivals = seen(lambda now: int(slope * (200 * now - now**2 / 2)), end)
    now = slope * (200 - end)
    expected = arrivals.rate()
    assert arrivals.rate(AHEAD_S) == expected
    assert expected is not None
    # Less than the mean of the window, by the slope without its standard error.
    assert 0.98 * now - 0.1 <= expected < slope * (200 - end + WINDOW_S / 2) + 0.1
    if slope > 1:
        assert expected < 1.08 * now


@given(before=st.floats(10, 100), after=st.floats(0, 10), since=st.integers(10, 60))
def test_after_a_sudden_fall_no_less_is_expected(before: float, after: float, since: int) -> None:
    arrivals = seen(lambda now: int(before * min(now, 60) + after * max(0, now - 60)), 60.0 + since)
    expected = arrivals.rate(AHEAD_S)
    assert expected is not None
    assert after - 0.2 <= expected <= before


@given(rate=st.floats(10, 100), dip=st.integers(1, 10), more=st.integers(1, 29))
def test_one_request_more_does_not_change_what_is_expected(
    rate: float, dip: int, more: int
) -> None:
    """The load has a dip in the middle of the window, so there is no trend."""

    def count(now: float, when: float) -> int:
        # The window is 59 to 90.
        before, after = 74.5 - dip / 2, 74.5 + dip / 2
        return int(rate * (min(now, before) + max(0, now - after))) + (now > when)

    without, one = (
        seen(lambda now, when=when: count(now, when), 90.0).rate(AHEAD_S)
        for when in (math.inf, 60.0 + more)
    )
    assert one == pytest.approx(without, rel=0.1)


@pytest.mark.parametrize("rate", [1.0, 5.0, 50.0])
def test_noise_is_seldom_a_trend(rate: float) -> None:
    rng, arrivals, total, found = random.Random(7), Arrivals(WINDOW_S, GAP_S), 0, []
    for now in range(4000):
        total += poisson(rng, rate)
        arrivals.seen([RouterLoad("router-0", begun=total)], float(now))
        found.append(arrivals.rate(AHEAD_S) or 0.0)
    assert sum(found) / len(found) == pytest.approx(rate, rel=0.15)
    assert sum(one > 1.8 * rate + 1 for one in found) < 0.02 * len(found)


def test_a_rate_needs_some_seconds() -> None:
    arrivals = Arrivals(WINDOW_S, GAP_S)
    assert arrivals.rate() is arrivals.recent_rate(10) is None
    for now, begun in ((0.0, 1000), (4.0, 1020), (8.0, 1040)):
        arrivals.seen([RouterLoad("router-0", begun=begun)], now)
        assert arrivals.rate() is arrivals.recent_rate(10) is None
    arrivals.seen([RouterLoad("router-0", begun=1060)], 12.0)
    assert arrivals.rate() == pytest.approx(5)
    assert arrivals.recent_rate(10) == pytest.approx(5)


def load(begun: int, waiting: int = 0, at_limit: int = 0, name: str = "a") -> RouterLoad:
    return RouterLoad(name, begun=begun, waiting=waiting, waiting_at_limit=at_limit)


def test_requests_that_wait_count_and_those_that_leave_the_queue_do_not() -> None:
    arrivals = Arrivals(WINDOW_S, GAP_S)
    # Each second ten come, one begins, and nine leave.
    for now in range(30):
        arrivals.seen([load(now, 9)], float(now))
    assert arrivals.rate() == pytest.approx(30 / 29, rel=0.1)
    # Of many that waited, most leave together.
    arrivals = Arrivals(WINDOW_S, GAP_S)
    for now, one in ((0.0, load(0)), (10.0, load(10, 90)), (20.0, load(20, 0))):
        arrivals.seen([one], now)
    assert 0 <= (arrivals.rate() or 0.0) <= 1


def test_requests_that_a_limit_holds_back_do_not_count() -> None:
    arrivals = Arrivals(WINDOW_S, GAP_S)
    for now in range(0, 30, 2):
        arrivals.seen([load(now, 50 * now, 50 * now)], float(now))
    assert arrivals.rate() == pytest.approx(1)


@pytest.mark.parametrize(
    "after",
    [
        # It has started again.
        [load(0)],
        # Another router serves, too, or one less.
        [load(100), load(10**6, name="b")],
        [load(10**6, name="b")],
    ],
)
def test_what_nobody_saw_is_no_arrival(after: list[RouterLoad]) -> None:
    arrivals = Arrivals(WINDOW_S, GAP_S)
    for now in range(20):
        arrivals.seen([load(5 * now)], float(now))
    arrivals.seen(after, 20.0)
    assert arrivals.rate() is None
    for now in range(21, 40):
        more = 3 * (now - 20)
        arrivals.seen([replace(one, begun=one.begun + more) for one in after], float(now))
    assert arrivals.rate(AHEAD_S) == pytest.approx(3 * len(after))


@pytest.mark.parametrize("sees_nobody", [False, True])
def test_an_outage_is_no_rise(sees_nobody: bool) -> None:
    """Redis was away. Routers come back into it after a while."""
    arrivals = Arrivals(WINDOW_S, gap_s=15.0)
    for now in range(60):
        arrivals.seen([load(40 * now)], float(now))
    for now in range(120, 180):
        arrivals.seen([] if sees_nobody and now < 125 else [load(40 * now)], float(now))
        rate = arrivals.rate(AHEAD_S)
        assert rate is None or rate == pytest.approx(40, rel=0.01)
    assert rate is not None


def test_counts_of_hours_ago_are_forgotten() -> None:
    """Another controller led in between, at another load."""
    arrivals = Arrivals(WINDOW_S, gap_s=15.0)
    for now in range(60):
        arrivals.seen([load(40 * now)], float(now))
    for now in range(3660, 3680):
        arrivals.seen([load(4000 + now // 2)], float(now))
        rate = arrivals.rate(AHEAD_S)
        assert rate is None or rate == pytest.approx(0.5, abs=0.1)


@given(st.lists(st.tuples(st.floats(0.1, 60), st.integers(0, 2**63 - 1)), min_size=1, max_size=200))
def test_any_counts_give_a_rate_and_a_bounded_memory(steps: list[tuple[float, int]]) -> None:
    arrivals, now = Arrivals(WINDOW_S, GAP_S), 0.0
    times = []
    for seconds, count in steps:
        now += seconds
        times.append(now)
        arrivals.seen([RouterLoad("router-0", begun=count)], now)
        rate = arrivals.rate(AHEAD_S)
        assert rate is None or 0 <= rate < float("inf")
    assert all(one[1] >= 0 for one in arrivals._counts)
    longest = max(after - before for before, after in pairwise([0, *times]))
    assert all(at >= now - WINDOW_S - longest for at, _ in arrivals._counts)
