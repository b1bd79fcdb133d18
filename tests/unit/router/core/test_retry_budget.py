from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.retry_budget import FLOOR, FLOOR_PER_S, MOST, RATIO, RetryBudget


def test_a_quiet_cluster_can_fail_over() -> None:
    budget = RetryBudget()
    assert [budget.withdraw(0.0) for _ in range(int(FLOOR) + 1)] == [True] * int(FLOOR) + [False]
    assert (budget.made, budget.refused) == (FLOOR, 1)


def test_the_floor_grows_again_with_time() -> None:
    budget = RetryBudget()
    while budget.withdraw(5.0):
        pass
    assert not budget.withdraw(5.0 + 0.9 / FLOOR_PER_S)
    assert budget.withdraw(5.0 + 1.1 / FLOOR_PER_S)


def test_five_requests_earn_a_retry() -> None:
    budget = RetryBudget()
    while budget.withdraw(0.0):
        pass
    for _ in range(int(1 / RATIO)):
        assert not budget.withdraw(0.0)
        budget.deposit()
    assert budget.withdraw(0.0)
    assert not budget.withdraw(0.0)


@given(st.lists(st.booleans(), max_size=2000), st.floats(0, 0.1))
def test_retries_are_at_most_what_was_earned_and_the_floor(
    first_attempts: list[bool], seconds_each: float
) -> None:
    budget = RetryBudget()
    now, earned, spent = 0.0, 0.0, 0
    for first in first_attempts:
        now += seconds_each
        if first:
            budget.deposit()
            earned += RATIO
        else:
            spent += budget.withdraw(now)
    assert spent <= FLOOR + earned + now * FLOOR_PER_S
    assert spent <= MOST + earned + now * FLOOR_PER_S
