"""Runs a simulation and returns its report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrelay.errors import DeadlineExceeded, InvalidArgument
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import Sample, Timeline
from kvrelay.loadtest.reuse import measure_reuse
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.simulation.agenda import Agenda
from kvrelay.simulation.cluster import HEARTBEAT_S, SimulatedCluster
from kvrelay.simulation.controller import Controller
from kvrelay.simulation.decode_steps import MOST_STEPS
from kvrelay.simulation.machine import Machine
from kvrelay.simulation.scenario import Scenario

# Most rows of a report. Beyond them, only every second, fourth, … request has a row.
MAX_ROWS = 50_000
# Most samples of the timeline. Beyond them, the interval doubles.
MAX_SAMPLES = 1200
# Most prompt tokens that are kept to compute the possible reuse.
MAX_REUSE_TOKENS = 20_000_000
# Longest time after the last arrival, in seconds. A cluster that is not through by then never is.
MAX_TAIL_S = 86_400.0


@dataclass(slots=True)
class _Rows:
    """The rows of every n-th request, and how many requests there were."""

    most: int
    every: int = 1
    ended: int = 0
    rows: list[Row] = field(default_factory=list)

    def keeps(self, index: int) -> bool:
        return index % self.every == 0

    def add(self, row: Row, detailed: bool) -> None:
        self.ended += 1
        if detailed and self.keeps(row.index):
            self.rows.append(row)
            if len(self.rows) > self.most:
                self.every *= 2
                self.rows = [one for one in self.rows if self.keeps(one.index)]


class Simulation:
    """One run of a scenario under a load. Two runs with equal arguments give equal reports."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Iterable[PlannedRequest],
        options: dict[str, Any],
        slos: tuple[Slo, ...] = (),
        *,
        done: Callable[[int], None] = lambda _: None,
        max_rows: int = MAX_ROWS,
        most_steps: int = MOST_STEPS,
    ) -> None:
        """`done` is called with the number of requests that have ended, after each.

        - plan: the requests in order of arrival, with token ids.
        - options: recorded in the report.
        """
        self.agenda = Agenda()
        self._scenario = scenario
        self._plan = enumerate(plan)
        self._options = options
        self._slos = slos
        self._report_done = done
        self._rows = _Rows(max_rows)
        machine = Machine(self.agenda, scenario.cores, scenario.times)
        self._clusters = [
            SimulatedCluster(scenario.share(number), self.agenda, machine, self._ended, most_steps)
            for number in range(scenario.routers)
        ]
        self._controllers = [Controller(one) for one in self._clusters]
        self._samples: list[Sample] = []
        self._sample_s = HEARTBEAT_S
        self._arrived_all = False
        self._last_arrival_s = 0.0
        self._prompts: dict[int, Sequence[int]] | None = {}
        self._prompt_tokens = 0

    @property
    def clusters(self) -> tuple[SimulatedCluster, ...]:
        """The clusters of the routers."""
        return tuple(self._clusters)

    def run(self) -> Report:
        """Runs to the end of the last request. Raises InvalidArgument for a load without requests
        or without token ids.
        """
        with _rare_collections():
            return self._run()

    def _run(self) -> Report:
        self._next_arrival()
        if self._arrived_all:
            raise InvalidArgument("the load has no requests")
        self._heartbeat()
        if self._controllers[0].interval_s is not None:
            self._decide()
        while self._working:
            if not self.agenda.run_next():
                break
            if self._arrived_all and self.agenda.now > self._last_arrival_s + MAX_TAIL_S:
                error = DeadlineExceeded(f"not finished {MAX_TAIL_S:g} s after the last arrival")
                for one in self._clusters:
                    one.router.cancel_all(error)
        return self._report()

    @property
    def _working(self) -> bool:
        return not self._arrived_all or any(one.router.unfinished for one in self._clusters)

    def _next_arrival(self) -> None:
        index, planned = next(self._plan, (0, None))
        if planned is None:
            self._arrived_all = True
            return
        if planned.token_ids is None:
            raise InvalidArgument("the requests of a simulation are token ids; leave --text out")
        self._last_arrival_s = planned.at
        at = planned.at + self._scenario.delays.request_s

        def arrive() -> None:
            cluster = self._clusters[index % len(self._clusters)]
            self._remember(index, planned)
            # The next one first, so that one arrival waits in the agenda at any time.
            self._next_arrival()
            cluster.router.submit(index, planned, self._rows.keeps(index))

        self.agenda.at(at, arrive)

    def _remember(self, index: int, planned: PlannedRequest) -> None:
        if self._prompts is None or planned.token_ids is None:
            return
        self._prompt_tokens += len(planned.token_ids)
        if self._prompt_tokens > MAX_REUSE_TOKENS:
            self._prompts = None
        else:
            self._prompts[index] = planned.token_ids

    def _ended(self, row: Row, detailed: bool) -> None:
        self._rows.add(row, detailed)
        self._report_done(self._rows.ended)

    def _heartbeat(self) -> None:
        for cluster in self._clusters:
            cluster.heartbeat()
        if not self._samples or self.agenda.now >= self._samples[-1].at_s + self._sample_s:
            if len(self._clusters) == 1:
                self._samples.append(self._clusters[0].sample())
            if len(self._samples) > MAX_SAMPLES:
                self._samples = self._samples[::2]
                self._sample_s *= 2
        if self._working:
            # An idle cluster without a policy has nothing to report before the next arrival.
            idle = not any(one.router.unfinished for one in self._clusters)
            skips = idle and self._controllers[0].interval_s is None
            next_s = self.agenda.now + HEARTBEAT_S
            self.agenda.at(max(next_s, self._last_arrival_s) if skips else next_s, self._heartbeat)

    def _decide(self) -> None:
        for cluster, controller in zip(self._clusters, self._controllers, strict=True):
            controller.decide(cluster.heartbeat())
        interval = self._controllers[0].interval_s
        if interval is not None and self._working:
            self.agenda.after(interval, self._decide)

    def _report(self) -> Report:
        rows = tuple(sorted(self._rows.rows, key=lambda row: row.index))
        decisions = tuple(self._decisions())
        reuse = None
        if self._prompts and self._rows.every == 1:
            block = self._scenario.config.kv.block_size
            reuse = measure_reuse(self._prompts, rows, block)
        seconds = sum(one.worker_seconds for one in self._clusters)
        return Report(
            options={
                **self._options,
                "simulated": True,
                "simulated_seconds": self.agenda.now,
                "worker_seconds": seconds,
            },
            slos=self._slos,
            rows=rows,
            timeline=Timeline(tuple(self._samples), decisions) if self._samples else None,
            reuse=reuse,
            row_every=self._rows.every,
        )

    def _decisions(self) -> Iterator[Any]:
        for one in self._controllers:
            yield from one.decisions


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes the cyclic garbage collector run rarely. A simulation makes many objects and few
    cycles, and the collector would visit the caches of all workers again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(
    scenario: Scenario,
    plan: Iterable[PlannedRequest],
    options: dict[str, Any],
    slos: tuple[Slo, ...] = (),
    done: Callable[[int], None] = lambda _: None,
    max_rows: int = MAX_ROWS,
) -> Report:
    """Runs a scenario under a load and returns the report of all requests. Deterministic. Raises
    InvalidArgument; see `Simulation`.
    """
    return Simulation(scenario, plan, options, slos, done=done, max_rows=max_rows).run()
