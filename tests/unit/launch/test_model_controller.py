"""One of several models that cannot be served ends its own workers, and not the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.errors import ModelRefused
from kvrelay.launch import model_controller
from kvrelay.launch.model_controller import ModelController


class Failing(ModelController):
    """Its runs end with the outcomes, one after the other; then it runs on."""

    def __init__(self, *outcomes: Exception) -> None:
        self.outcomes = list(outcomes)
        self.stops = 0
        self.runs_on = asyncio.Event()
        self._pools: Any = type("", (), {"config": type("", (), {"model": DEMO})})

    async def run(self) -> None:
        if self.outcomes:
            raise self.outcomes.pop(0)
        self.runs_on.set()
        await asyncio.Event().wait()

    async def stop_all(self) -> None:
        self.stops += 1


class DEMO:
    name = "demo"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_controller, "_PAUSE_S", 0.001)


async def ended(controller: Failing, is_fatal: Callable[[], bool]) -> None:
    await asyncio.wait_for(controller.run_contained(is_fatal), 30)


async def test_it_stops_its_workers_and_starts_them_again() -> None:
    controller = Failing(ModelRefused("bad"), ModelRefused("bad"))
    running = asyncio.create_task(controller.run_contained(lambda: False))
    await asyncio.wait_for(controller.runs_on.wait(), 30)
    assert controller.stops == 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_what_is_fatal_ends_the_controller() -> None:
    answers = [False, True]
    controller = Failing(ModelRefused("once"), ModelRefused("twice"))
    with pytest.raises(ModelRefused, match="twice"):
        await ended(controller, lambda: answers.pop(0))


async def test_a_bug_ends_the_controller() -> None:
    with pytest.raises(ZeroDivisionError):
        await ended(Failing(ZeroDivisionError()), lambda: False)
