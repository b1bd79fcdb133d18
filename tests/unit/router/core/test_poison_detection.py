from __future__ import annotations

import pytest

from router.core.poison_detection import GUILTY, PAUSE_S, SLACK, YOUNG_TOKENS, Suspicion


def deaths_until_guilty(produced: list[int]) -> int:
    """How many workers die under a request whose attempts give so many tokens each before that."""
    suspicion = Suspicion()
    for number, tokens in enumerate(produced, start=1):
        suspicion.worker_died(tokens, float(number))
        if suspicion.guilty:
            return number
    return 0


@pytest.mark.parametrize(
    ("produced", "deaths"),
    [
        ([0, 0], 2),  # with its first step
        ([-1, -1], 2),  # while it is prefilled
        ([4, 4, 4], 3),  # with its fifth token, counted from each attempt's first
        ([4, 5, 3], 3),  # a token more or less was on the way
        ([4, 0, 0], 3),  # at its fifth token: the next attempts begin there
        ([200, 0, 0], 3),  # late, and from then on at once
        ([200, 200, 200, 200], 0),  # it ran well each time
        ([0, 200, 0], 0),  # a long run clears it
        ([4, 13, 22, 31], 0),  # it outlives each death
    ],
)
def test_how_many_workers_a_request_may_kill(produced: list[int], deaths: int) -> None:
    assert deaths_until_guilty(produced) == deaths


def test_first_death_among_the_first_tokens_holds_nobody_up() -> None:
    suspicion = Suspicion()
    suspicion.worker_died(5, 1.0)
    assert (suspicion.suspected, suspicion.not_before) == (False, 0.0)


def test_a_suspect_pauses_and_is_cleared_when_it_outlives_its_last_death() -> None:
    suspicion = Suspicion()
    suspicion.worker_died(5, 1.0)
    suspicion.worker_died(5, 2.0)
    assert suspicion.suspected
    assert suspicion.weight < GUILTY
    assert suspicion.not_before == 2.0 + PAUSE_S
    assert not suspicion.outlived(5 + SLACK)
    assert suspicion.outlived(6 + SLACK)
    suspicion.worker_died(YOUNG_TOKENS + 1, 3.0)
    assert (suspicion.weight, suspicion.outlived(1)) == (0, True)
