from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.steps.step_watch import FIRST_S, LEAST_S, POLL_S, TIMES_SLOWEST, StepWatch


def polled_until_hung(watch: StepWatch, now: float, period: float = POLL_S) -> float:
    """Seconds from `now` to the poll that says so."""
    for number in range(1, 1_000_000):
        if watch.poll(now + number * period):
            return number * period
    raise AssertionError("never")


def measured(*steps: tuple[int, float]) -> StepWatch:
    """A watch that has seen a first step and these, (tokens, seconds)."""
    watch = StepWatch()
    for tokens, seconds in ((8, 100.0), *steps):
        watch.began(tokens, 0.0)
        watch.ended(seconds)
    return watch


def test_the_first_step_may_build_kernels() -> None:
    watch = StepWatch()
    watch.began(32, 0.0)
    assert polled_until_hung(watch, 0.0) == FIRST_S + POLL_S


@pytest.mark.parametrize(
    ("steps", "tokens", "bound_s"),
    [
        ([(32, 0.01)], 32, LEAST_S),
        ([(32, 5.0)], 32, TIMES_SLOWEST * 5.0),
        ([(32, 5.0), (33, 7.0)], 60, TIMES_SLOWEST * 7.0),
        ([(32, 5.0), (600, 9.0)], 32, TIMES_SLOWEST * 5.0),
        ([(32, 6.4)], 512, TIMES_SLOWEST * 6.4 / 32 * 512),
        ([(32, 1.0)] + [(32, 5.0)] * 100, 32, TIMES_SLOWEST * 5.0),
        ([(32, 9.0)] + [(32, 5.0)] * 100, 32, TIMES_SLOWEST * 5.0),
    ],
)
def test_the_bound_follows_what_steps_of_that_size_take(
    steps: list[tuple[int, float]], tokens: int, bound_s: float
) -> None:
    watch = measured(*steps)
    watch.began(tokens, 1000.0)
    assert watch.bound_s == pytest.approx(bound_s)
    assert polled_until_hung(watch, 1000.0) == pytest.approx(bound_s + POLL_S)


def test_between_steps_nothing_hangs() -> None:
    watch = measured((32, 0.1))
    assert not watch.poll(1e6)
    watch.began(32, 1e6)
    watch.poll(1e6 + 1)
    assert watch.age_s == POLL_S * 2
    watch.ended(1e6 + 2)
    assert watch.age_s == 0
    assert not watch.poll(2e6)


def test_a_pause_of_the_whole_process_is_no_hang() -> None:
    watch = measured((32, 0.1))
    watch.began(32, 0.0)
    assert not watch.poll(3600.0), "it was stopped, and goes on"
    assert watch.age_s <= 2 * POLL_S


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100)), max_size=30), st.integers(1, 4096)
)
def test_a_step_that_is_as_slow_as_another_of_its_size_never_hangs(
    steps: list[tuple[int, float]], tokens: int
) -> None:
    watch = measured(*steps)
    watch.began(tokens, 0.0)
    alike = [seconds for size, seconds in steps if size.bit_length() == tokens.bit_length()]
    assert watch.bound_s >= max([LEAST_S, *alike])
