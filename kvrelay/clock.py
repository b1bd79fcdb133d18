"""Clocks that callers pass in, so that pure code and tests control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds from an arbitrary start."""

    def now(self) -> float:
        """Returns the current time in seconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. All processes of one host share its origin."""

    def now(self) -> float:
        """Returns the current time in seconds."""
        return time.monotonic()


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Returns the current time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward. Asserts that `seconds` is not negative."""
        assert seconds >= 0, f"time cannot go back by {-seconds} s"
        self._now += seconds
