"""Time and steps of real workers, in the hands of a test."""

from __future__ import annotations

import pytest
from support.worker_harness import Engine

from kvrelay.clock import ManualClock
from kvrelay.engine.runner import ModelRunner
from kvrelay.worker.runtime import host


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Of the workers that are started after it."""
    manual = ManualClock()
    monkeypatch.setattr(host, "MonotonicClock", lambda: manual)
    return manual


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(ModelRunner.run)
    monkeypatch.setattr(
        ModelRunner, "run", lambda runner, *arguments: engine.step(runner, *arguments)
    )
    return engine
