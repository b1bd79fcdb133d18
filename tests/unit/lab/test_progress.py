"""The progress of the lab moves with each measured point."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from kvrelay.bench.engine_bench import Engine
from kvrelay.lab import noisy_neighbour
from kvrelay.lab.engine_experiment import MOVES, StepClock


class CountingEngine:
    """Counts the runs that it is asked for."""

    def __init__(self) -> None:
        self.runs = 0

    def prefill(self, prompt: Sequence[int]) -> float:
        self.runs += 1
        return 1.0

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        pass

    def decode(self, steps: int) -> float:
        self.runs += 1
        return 1.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_each_run_moves_the_progress_and_each_case_ends_in_its_place(phase: str) -> None:
    engine = CountingEngine()
    moves: list[int] = []
    steps = StepClock(cast(Engine, engine), 9, lambda: moves.append(engine.runs))

    def measure(size: int) -> float:
        return steps.prefill(size) if phase == "prefill" else steps.decode(size, 4)

    found = steps.measured((1, 2, 4), measure, 600.0)
    assert list(found) == [1, 2, 4]
    # The first move of a case is after its preparation, the others after a run each.
    assert moves == list(range(1, 3 * MOVES + 1))
    # Without time, two cases are measured, with one run each, and all are done.
    moves.clear()
    assert list(steps.measured((1, 2, 4), measure, 0.0)) == [1, 2]
    assert len(moves) == 3 * MOVES


async def test_the_progress_moves_while_streams_run_and_ends_with_a_failure() -> None:
    moves = 0

    def move() -> None:
        nonlocal moves
        moves += 1

    endless = asyncio.create_task(asyncio.Event().wait())
    assert await noisy_neighbour._some_time([endless], 0.01, move) == set()
    assert moves == noisy_neighbour._MOVES

    async def fail() -> None:
        raise ValueError

    failing = asyncio.create_task(fail())
    assert await noisy_neighbour._some_time([endless, failing], 600.0, move) == {failing}
    assert moves == noisy_neighbour._MOVES
    endless.cancel()
    assert isinstance(failing.exception(), ValueError)
