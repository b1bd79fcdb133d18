"""Time as a thing that is passed in, so that pure code and tests own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds from an arbitrary start."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock; the same origin for all processes of one host."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time cannot go back by {-seconds} s"
        self._now += seconds
