from __future__ import annotations

import pytest

from router.core.poison_detection import PAUSE_S, POISON_SCORE, SLACK, YOUNG_TOKENS, CrashHistory


def deaths_until_poison(produced: list[int]) -> int:
    """How many workers die under a request whose attempts give so many tokens each before that."""
    crashes = CrashHistory()
    for number, tokens in enumerate(produced, start=1):
        crashes.worker_died(tokens, float(number))
        if crashes.is_poison:
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
    assert deaths_until_poison(produced) == deaths


def test_first_death_among_the_first_tokens_holds_nobody_up() -> None:
    crashes = CrashHistory()
    crashes.worker_died(5, 1.0)
    assert (crashes.suspected, crashes.not_before) == (False, 0.0)


def test_a_suspect_pauses_and_is_cleared_when_it_outlives_its_last_death() -> None:
    crashes = CrashHistory()
    crashes.worker_died(5, 1.0)
    crashes.worker_died(5, 2.0)
    assert crashes.suspected
    assert crashes.score < POISON_SCORE
    assert crashes.not_before == 2.0 + PAUSE_S
    assert not crashes.outlived(5 + SLACK)
    assert crashes.outlived(6 + SLACK)
    crashes.worker_died(YOUNG_TOKENS + 1, 3.0)
    assert (crashes.score, crashes.outlived(1)) == (0, True)
