"""Who is to blame for a step that raises, in how many steps more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.steps.bisection import most_runs_in_vain, run_apart


class Engine:
    """Squares numbers; raises for a part that has a culprit in it."""

    def __init__(self, culprits: frozenset[int], size_limit: int = 10**6) -> None:
        self.culprits = culprits
        self.runs: list[Sequence[int]] = []
        self._size_limit = size_limit

    async def __call__(self, part: Sequence[int]) -> list[int]:
        self.runs.append(part)
        self.check(part)
        return [one * one for one in part]

    def check(self, part: Sequence[int]) -> None:
        if len(part) > self._size_limit:
            raise MemoryError(f"no room for {len(part)}")
        if found := self.culprits.intersection(part):
            raise RuntimeError(f"{sorted(found)} cannot be squared")


def apart(size: int, engine: Engine) -> dict[int, int | Exception]:
    return asyncio.run(run_apart(range(size), RuntimeError("the whole"), engine))


sizes_and_culprits = st.integers(1, 64).flatmap(
    lambda size: st.tuples(
        st.just(size), st.frozensets(st.integers(0, size - 1), min_size=1, max_size=3)
    )
)


@given(sizes_and_culprits)
def test_only_the_culprits_fail_and_the_others_get_what_is_theirs(
    case: tuple[int, frozenset[int]],
) -> None:
    size, culprits = case
    engine = Engine(culprits)
    outcomes = apart(size, engine)
    assert {one for one, outcome in outcomes.items() if isinstance(outcome, Exception)} == culprits
    assert {one: outcome for one, outcome in outcomes.items() if one not in culprits} == {
        one: one * one for one in range(size) if one not in culprits
    }
    depth = (size - 1).bit_length()
    assert len(engine.runs) <= 2 * depth * len(culprits), "logarithmic for each of them"


@given(st.integers(1, 512))
def test_an_engine_that_does_nothing_is_not_asked_for_each_sequence(size: int) -> None:
    engine = Engine(frozenset(range(size)))
    outcomes = apart(size, engine)
    assert set(outcomes) == set(range(size))
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert len(engine.runs) <= min(most_runs_in_vain(size), 2 * size - 2)


@given(st.integers(2, 64), st.data())
def test_neighbours_of_many_culprits_side_by_side_are_not_taken_for_more_of_them(
    size: int, data: st.DataObject
) -> None:
    """As when one client has sent many of a kind at one time, and others were there before or came
    after.
    """
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, max(1, size // 2)))
    culprits = frozenset(range(first, min(size, first + count)))
    outcomes = apart(size, Engine(culprits))
    assert {one for one, outcome in outcomes.items() if isinstance(outcome, Exception)} == culprits


@pytest.mark.parametrize("size", [2, 7, 16, 33, 64])
def test_a_batch_whose_first_half_fails_is_not_taken_for_a_broken_engine(size: int) -> None:
    culprits = frozenset(range(size // 2))
    outcomes = apart(size, Engine(culprits))
    assert {one for one, outcome in outcomes.items() if isinstance(outcome, Exception)} == culprits


@given(st.integers(2, 64), st.data())
def test_nobody_is_blamed_where_smaller_steps_have_room(size: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, size - 1))
    engine = Engine(frozenset(), size_limit=limit)
    assert apart(size, engine) == {one: one * one for one in range(size)}


def test_an_error_holds_no_frames_while_other_parts_run() -> None:
    """They hold the tensors of the run that failed, in memory that the next run may need."""
    outcomes = apart(8, Engine(frozenset({3})))
    assert isinstance(outcomes[3], RuntimeError)
    assert outcomes[3].__traceback__ is None
