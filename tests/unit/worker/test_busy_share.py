from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.steps.busy_share import WINDOW_S, BusyTime, RecentMean


def test_it_is_the_share_of_the_window() -> None:
    busy = BusyTime(0.0)
    assert busy.share(0.0) == 0.0
    busy.began(100.0)
    busy.ended(102.0)
    busy.began(103.0)
    assert busy.share(104.0) == pytest.approx(0.3), "the step that runs counts"
    busy.ended(105.0)
    assert busy.share(111.0) == pytest.approx((1 + 2) / WINDOW_S), (
        "of the first span what is in the window"
    )
    assert busy.share(200.0) == 0.0


def test_a_worker_that_has_just_come_is_judged_by_its_life() -> None:
    busy = BusyTime(50.0)
    busy.began(50.0)
    busy.ended(52.0)
    assert busy.share(54.0) == pytest.approx(0.5)
    assert BusyTime(0.0).share(0.001) == 0.0


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=200))
def test_spans_are_few_and_the_share_is_right(steps: list[tuple[float, float]]) -> None:
    busy, now, spans = BusyTime(0.0), 20.0, []
    for pause, length in steps:
        now += pause
        busy.began(now)
        spans.append((now, now + length))
        now += length
        busy.ended(now)
    exact = sum(max(0.0, end - max(began, now - WINDOW_S)) for began, end in spans) / WINDOW_S
    assert exact - 1e-9 <= busy.share(now) <= min(1.0, exact + 0.005 * len(steps) / WINDOW_S) + 1e-9
    assert len(busy._spans) <= WINDOW_S / 0.005


def test_a_value_counts_for_as_long_as_it_lasted() -> None:
    slots = RecentMean(0.0)
    assert slots.mean(0.0) == 0.0
    slots.is_now(1.0, 2.0)
    assert slots.mean(4.0) == pytest.approx(0.5), "of its life"
    slots.is_now(0.0, 20.0)
    assert slots.mean(20.0) == pytest.approx(1.0)
    assert slots.mean(22.5) == pytest.approx(0.75)
    slots.is_now(0.0, 60.0)
    assert slots.mean(60.0) == 0.0
    for step in range(100_000):
        slots.is_now(step % 2, 60.0 + step / 1000)
    assert slots.mean(160.0) == pytest.approx(0.5, abs=1e-3)
    assert len(slots._values) <= 1000 * WINDOW_S + 2
