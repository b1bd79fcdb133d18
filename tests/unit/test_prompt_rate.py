"""The measured rate of prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.prompt_rate import PromptRate


def test_prompts_that_share_a_step_have_its_rate_together() -> None:
    rate = PromptRate()
    assert rate.per_second == 0.0
    rate.add(64, 0.01)
    for _ in range(7):
        rate.add(64, 0.0)
    assert rate.per_second == pytest.approx(8 * 64 / 0.01, rel=0.05)


def test_a_short_prompt_hardly_changes_the_rate_of_long_ones() -> None:
    rate = PromptRate()
    rate.add(8000, 8.0)
    rate.add(1, 0.01)
    assert rate.per_second == pytest.approx(1000, rel=0.01)


@given(st.lists(st.integers(1, 10**6), min_size=1), st.floats(1e-3, 1e6))
def test_a_steady_worker_has_its_rate_whatever_the_prompts(sizes: list[int], speed: float) -> None:
    rate = PromptRate()
    for size in sizes:
        rate.add(size, size / speed)
    assert rate.per_second == pytest.approx(speed)
