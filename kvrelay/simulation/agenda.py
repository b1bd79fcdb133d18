"""The virtual clock, and what is due on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Runs actions in order of their times. Actions of the same time run in the order in which they
    were added, so a simulation is deterministic.
    """

    def __init__(self) -> None:
        # Seconds since the start of the simulation.
        self.now = 0.0
        self.actions_run = 0
        self._due: list[tuple[float, int, Action]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, when: float, action: Action) -> None:
        """Adds an action. A time in the past means now."""
        self._added += 1
        heapq.heappush(self._due, (max(when, self.now), self._added, action))

    def after(self, seconds: float, action: Action) -> None:
        """Adds an action that is due in `seconds`."""
        self.at(self.now + seconds, action)

    def run_next(self) -> bool:
        """Runs the next action at its time. Returns False if there is none."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        self.actions_run += 1
        action()
        return True


class VirtualClock:
    """The agenda's time, as a clock of the production classes."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda

    def now(self) -> float:
        """Seconds since the start of the simulation."""
        return self._agenda.now
