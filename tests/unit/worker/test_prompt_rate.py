"""The measured rate of prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.steps.prompt_rate import WINDOW_S, PromptRate

LEAST = 64


@given(
    st.lists(st.integers(LEAST, 10**6), min_size=5, max_size=40),
    st.floats(1e-3, 1e6),
    st.lists(st.tuples(st.integers(LEAST, 10**6), st.floats(1e-9, 1e9)), max_size=2),
    st.randoms(use_true_random=False),
)
def test_no_odd_step_changes_the_rate_of_a_steady_worker(
    sizes: list[int], speed: float, odd: list[tuple[int, float]], random: st.RandomSource
) -> None:
    steps = [(size, size / speed) for size in sizes[-15:]]
    for one in odd:
        steps.insert(random.randint(0, len(steps)), one)
    rate = PromptRate(LEAST)
    for tokens, seconds in steps[-15:]:
        rate.add(tokens, seconds, now=1.0)
    assert rate.per_second(now=2.0) == pytest.approx(speed, rel=1e-6)


def test_steps_with_few_prompt_tokens_do_not_count() -> None:
    rate = PromptRate(LEAST)
    for _ in range(20):
        rate.add(LEAST - 1, 0.05, now=1.0)
    assert rate.per_second(now=1.0) is None


def test_a_rate_that_is_no_longer_measured_becomes_unknown() -> None:
    rate = PromptRate(LEAST)
    rate.add(100, 50.0, now=0.0)
    assert rate.per_second(now=WINDOW_S - 1) == 2.0
    assert rate.per_second(now=WINDOW_S) is None
    rate.add(100, 0.1, now=WINDOW_S)
    assert rate.per_second(now=WINDOW_S) == pytest.approx(1000)
