from __future__ import annotations

import math
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.arrivals import arrival_times
from kvrelay.loadtest.rate import Stage, arrivals, constant, parse_rate, rate_text

STAGES = st.lists(
    st.builds(Stage, st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 10)), min_size=1, max_size=4
)


def expected(stages: list[Stage], time: float) -> float:
    """The naive integral of the rate up to `time`."""
    total = 0.0
    for stage in stages:
        spent = min(time, stage.seconds)
        total += (stage.first + (stage.last - stage.first) * spent / stage.seconds / 2) * spent
        time -= spent
    return total


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("4", (Stage(4, 4),)),
        ("inf", (Stage(math.inf, math.inf),)),
        ("1:30,2:30", (Stage(1, 1, 30), Stage(2, 2, 30))),
        ("1-6:60,0:5", (Stage(1, 6, 60), Stage(0, 0, 5))),
    ],
)
def test_rates_are_read_and_written(text: str, stages: tuple[Stage, ...]) -> None:
    assert parse_rate(text) == stages
    assert rate_text(stages) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "nan",
        "fast",
        "1:0",
        "1:-5",
        "1:inf",
        "1-2",
        "1-2-3:4",
        "1,2",
        "0:5",
        "inf:5",
        "1:2,",
    ],
)
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--rate"):
        parse_rate(text)


def test_a_rate_that_is_no_number_is_not_called_negative() -> None:
    with pytest.raises(InvalidArgument, match="'nan': rates must be 0 or more"):
        parse_rate("nan")


@given(STAGES)
def test_evenly_spaced_arrivals_come_when_the_rate_adds_up_to_whole_numbers(
    stages: list[Stage],
) -> None:
    times = list(arrivals(stages, lambda _: 1.0))
    assert times == sorted(times)
    for number, time in enumerate(times):
        assert expected(stages, time) == pytest.approx(number, rel=1e-6, abs=1e-6)
    assert len(times) == pytest.approx(expected(stages, math.inf), abs=1.001)


def test_a_ramp_of_random_arrivals_has_its_rate_everywhere() -> None:
    times = arrival_times(parse_rate("0-2000:10"), 1.0, None, None, Random(3))
    for begin in range(10):
        count = sum(begin <= time < begin + 1 for time in times)
        assert count == pytest.approx(200 * begin + 100, rel=0.1, abs=40)


def test_infinite_burstiness_is_evenly_spaced() -> None:
    times = arrival_times(constant(4.0), math.inf, 5, None, Random(0))
    assert times == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_gap_goes_on_in_the_next_stage() -> None:
    """A gap of 1 expected arrival: half of it in the first stage, the other half twice as fast."""
    assert list(islice(arrivals((Stage(1, 1, 1.5), Stage(2, 2)), lambda _: 1.0), 4)) == [
        0.0,
        1.0,
        1.75,
        2.25,
    ]


def test_gaps_know_their_stage() -> None:
    seen: list[int] = []

    def gap(stage: int) -> float:
        seen.append(stage)
        return 1.0

    assert np.diff(
        list(arrivals((Stage(1, 1, 2), Stage(0, 0, 9), Stage(1, 1, 2)), gap))
    ).tolist() == [1.0, 10.0, 1.0]
    assert seen == [0, 0, 2, 2]


def test_the_first_arrival_may_be_expected_later() -> None:
    stages = (Stage(1, 1, 1), Stage(2, 2, 2))
    assert list(arrivals(stages, lambda _: 1.0, 0.5)) == [0.5, 1.25, 1.75, 2.25, 2.75]
    assert list(arrivals(stages, lambda _: 1.0, 2.0)) == [1.5, 2.0, 2.5]


def test_stages_do_not_add_up_to_for_ever() -> None:
    with pytest.raises(InvalidArgument, match="--rate"):
        parse_rate("1:1e308,1:1e308")


@given(st.floats(1e-9, 1e9), st.none() | st.floats(1e-9, 1e9), st.none() | st.floats(1e-9, 1e9))
def test_any_rate_between_the_bounds_is_read_as_it_is_written(
    first: float, last: float | None, seconds: float | None
) -> None:
    text = f"{first!r}{'' if last is None else f'-{last!r}'}"
    if seconds is not None or (last is not None and last != first):
        text += f":{seconds or 1.0!r}"
    (stage,) = parse_rate(text)
    assert (stage.first, stage.last) == (first, first if last is None else last)
    assert math.isfinite(stage.time_of(min(stage.arrivals, 1.0) / 2))


@pytest.mark.parametrize("text", ["1e300", "1e-300", "1-1e155:5", "1:1e-200", "1:1e200"])
def test_rates_whose_products_overflow_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is outside of 0.000000001 to 1,000,000,000;"):
        parse_rate(text)
