from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.backoff import MAX_DELAY_S, WINDOW_S, Deaths


def test_nobody_waits_for_the_first_replacement() -> None:
    assert Deaths().replace_at == 0
    assert Deaths().and_at(100.0).replace_at == 100


def test_each_further_death_doubles_the_delay_up_to_a_limit() -> None:
    deaths, delays = Deaths(), []
    for second in range(9):
        deaths = deaths.and_at(float(second))
        delays.append(deaths.replace_at - second)
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_old_deaths_are_forgotten() -> None:
    deaths = Deaths().and_at(0.0).and_at(1.0).and_at(1.0 + WINDOW_S)
    assert deaths == Deaths((1.0 + WINDOW_S,))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200).map(sorted))
def test_delays_are_bounded(times: list[float]) -> None:
    deaths = Deaths()
    for time in times:
        deaths = deaths.and_at(time)
        assert 0 <= deaths.replace_at - time <= MAX_DELAY_S + 1e-6
