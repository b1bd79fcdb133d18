"""The machine that processes of a simulation share, and the time that their steps take on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from random import Random

from kvrelay.simulation.agenda import Action, Agenda
from kvrelay.simulation.scenario import StepTimes
from kvrelay.types.workers import POOLS, PoolName

# What a process computes: steps of a pool, or None for its start, which is slowed by a lack of
# cores only.
Kind = PoolName | None


class Machine:
    """Knows which processes compute. Without `cores`, each has a machine of its own."""

    def __init__(
        self, agenda: Agenda, cores: int | None, times: Mapping[PoolName, StepTimes]
    ) -> None:
        """`times`: by the pool whose steps they are."""
        self.agenda = agenda
        self.times = times
        self._cores = cores
        # In the order in which they began, so that a simulation is deterministic.
        self._busy: dict[Process, Kind] = {}
        self._processes = 0

    def next_random(self) -> Random:
        """Returns the noise of another process, which does not depend on the steps of others."""
        self._processes += 1
        return Random(self._processes)

    def begins(self, process: Process, kind: Kind) -> None:
        """Notes that a process computes from now on."""
        if self._cores is not None and self._busy.get(process, "") != kind:
            self._busy[process] = kind
            self._share(self._cores)

    def ends(self, process: Process) -> None:
        """Notes that a process waits or is gone."""
        if self._cores is not None and process in self._busy:
            del self._busy[process]
            self._share(self._cores)

    def _share(self, cores: int) -> None:
        kinds = Counter(self._busy.values())
        speeds = {kind: self._speed(kind, kinds, cores) for kind in kinds}
        for process, kind in self._busy.items():
            process.runs_at(speeds[kind])

    def _speed(self, kind: Kind, kinds: Counter[Kind], cores: int) -> float:
        """Returns the speed of a process beside the others, relative to one alone."""
        share = min(1.0, cores / kinds.total())
        others = {pool: kinds[pool] - (pool == kind) for pool in POOLS}
        number = sum(others.values())
        if kind is None or not number:
            return share
        beside = self.times[kind].beside
        return share * number / sum(count * beside[pool] for pool, count in others.items())


class Process:
    """A worker as the machine sees it. Its steps take longer while other processes compute."""

    def __init__(self, machine: Machine) -> None:
        # Is called with a factor for the times of steps that are planned and not run by `run`.
        self.slowed: Callable[[float], None] = lambda _: None
        self._machine = machine
        self._random = machine.next_random()
        # Relative to a process that is alone on the machine.
        self.speed = 1.0
        self._end_s = 0.0
        self._action: Action | None = None
        self._ends_set = 0

    def begins(self, kind: Kind) -> None:
        """Computes from now on."""
        self._machine.begins(self, kind)

    def ends(self) -> None:
        """Waits from now on, or is gone."""
        self._machine.ends(self)

    def step_factors(self, kind: PoolName, count: int) -> Iterable[float]:
        """Returns the times of `count` steps alone on the machine, relative to the profile."""
        times = self._machine.times[kind]
        if len(times.noise) == 1:
            return repeat(times.alone, count)
        alone, noise = times.alone, times.noise
        draw, size = self._random.random, len(noise)
        return (alone * noise[int(draw() * size)] for _ in range(count))

    def run(self, seconds: float, kind: Kind, action: Action) -> None:
        """Runs the action after what takes `seconds` alone on the machine."""
        self.begins(kind)
        self._action = action
        self._set_end(self._machine.agenda.now + seconds / self.speed)

    def runs_at(self, speed: float) -> None:
        """Changes the speed, now."""
        if speed == self.speed:
            return
        ratio, self.speed = self.speed / speed, speed
        if self._action is not None:
            now = self._machine.agenda.now
            self._set_end(now + ratio * (self._end_s - now))
        self.slowed(ratio)

    def _set_end(self, when: float) -> None:
        self._end_s = when
        self._ends_set += 1
        number = self._ends_set

        def end() -> None:
            action = self._action
            if self._ends_set == number and action is not None:
                self._action = None
                action()

        self._machine.agenda.at(when, end)
