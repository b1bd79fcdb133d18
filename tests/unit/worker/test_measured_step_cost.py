"""The utilisation of a decode worker, from the times of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.steps.busy_share import WINDOW_S
from kvrelay.worker.steps.measured_step_cost import StepCost, utilisation

FIXED_S = st.floats(1e-4, 0.1)
TOKEN_S = st.floats(0, 0.01)


def after(sizes: list[int], fixed_s: float, token_s: float, noise: list[float]) -> StepCost:
    """Steps of these sizes, one after the other, with some of them slower than the line."""
    cost, now = StepCost(0.0), 0.0
    for number, size in enumerate(sizes):
        seconds = (fixed_s + token_s * size) * (1 + noise[number % len(noise)])
        now += seconds
        cost.ended(size, seconds, now)
    return cost


@given(FIXED_S, TOKEN_S, st.lists(st.integers(1, 64), min_size=2, max_size=50))
def test_the_cost_of_a_token_is_learnt_from_steps_of_different_sizes(
    fixed_s: float, token_s: float, sizes: list[int]
) -> None:
    cost = after(sizes, fixed_s, token_s, [0.0])
    expected = token_s if len(set(sizes)) > 1 else 0.0
    assert cost.token_s == pytest.approx(expected, rel=1e-4, abs=1e-9)


@given(
    FIXED_S,
    TOKEN_S,
    st.lists(st.integers(1, 4096), min_size=1, max_size=50),
    st.lists(st.floats(0, 1000), min_size=1, max_size=7),
)
def test_no_noise_takes_it_out_of_bounds(
    fixed_s: float, token_s: float, sizes: list[int], noise: list[float]
) -> None:
    cost = after(sizes, fixed_s, token_s, noise)
    assert 0 <= cost.token_s < float("inf")
    assert 0 <= cost.added(0.0) <= 1
    assert cost.added(1e9) == 0.0, "the steps are long over"


def test_the_added_share_is_that_of_the_window() -> None:
    cost, now = StepCost(0.0), 0.0
    for number in range(2000):
        size = 1 + number % 8
        now += 0.01 + 0.005 * size
        cost.ended(size, 0.01 + 0.005 * size, now)
    mean = 4.5 * 0.005
    assert cost.added(now) == pytest.approx(mean / (0.01 + mean), rel=0.02)
    assert cost.added(now + WINDOW_S / 2) == pytest.approx(mean / (0.01 + mean) / 2, rel=0.02)


@given(FIXED_S, TOKEN_S, st.integers(2, 256), st.data())
def test_twice_the_utilisation_is_twice_the_throughput(
    fixed_s: float, token_s: float, full: int, data: st.DataObject
) -> None:
    """The utilisation of a batch is its share of the full batch's tokens per second."""
    batch = data.draw(st.integers(1, full))

    def throughput(size: int) -> float:
        return size / (fixed_s + token_s * size)

    added = token_s * batch / (fixed_s + token_s * batch)
    assert utilisation(added, batch / full) == pytest.approx(throughput(batch) / throughput(full))


def test_an_idle_worker_and_a_full_one() -> None:
    assert utilisation(0.0, 0.0) == 0.0
    assert utilisation(0.3, 1.2) == 1.0
    assert utilisation(1.5, 0.1) == 1.0
