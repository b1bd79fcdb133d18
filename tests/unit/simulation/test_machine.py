"""Workers that share the cores of one machine, against times computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import simulated

from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.simulation.agenda import Agenda
from kvrelay.simulation.machine import Kind, Machine, Process
from kvrelay.simulation.scenario import Delays, StepTimes, as_profiled
from kvrelay.types.workers import POOLS, PoolName

NONE = Delays(0.0, 0.0, 0.0)
COSTS = simulated.profile().costs


def finished(
    tasks: list[tuple[float, float, Kind]], cores: int | None, times: dict[PoolName, StepTimes]
) -> list[float]:
    """Returns when processes end that each have one step: (start, seconds, kind)."""
    agenda = Agenda()
    machine = Machine(agenda, cores, times)
    ends = [0.0] * len(tasks)

    def add(number: int, seconds: float, kind: Kind) -> None:
        process = Process(machine)

        def end() -> None:
            ends[number] = agenda.now
            process.ends()

        process.run(seconds, kind, end)

    for number, (at, seconds, kind) in enumerate(tasks):
        agenda.at(at, lambda number=number, rest=(seconds, kind): add(number, *rest))  # type: ignore[misc]
    while agenda.run_next():
        pass
    return ends


def test_two_processes_share_a_core() -> None:
    # Alone for a second, half the speed for two, alone again.
    assert finished([(0, 3, "prefill"), (1, 1, "decode")], 1, as_profiled()) == [4, 3]


def test_a_neighbour_slows_by_what_it_does() -> None:
    times: dict[PoolName, StepTimes] = {
        "prefill": StepTimes(1.0, {"prefill": 1.25, "decode": 2.0}),
        "decode": StepTimes(1.0, {"prefill": 1.0, "decode": 1.5}),
    }
    assert finished([(0, 3, "prefill"), (1, 1, "decode")], 4, times) == [3.5, 2]
    # A start slows others, and is slowed, by the cores that it takes only.
    assert finished([(0, 3, "prefill"), (1, 1, None)], 4, times) == [3, 2]
    assert finished([(0, 3, "prefill"), (1, 1, None)], 1, times) == [4, 3]
    assert finished([(0, 2, "prefill"), (0, 2, "prefill")], 4, times) == [2.5, 2.5]
    # Unlike neighbours count in equal shares.
    three: list[tuple[float, float, Kind]] = [(0, 1, "prefill"), (0, 1, "decode")]
    assert finished([*three, (0, 1, "decode")], 4, times) == [1.625, 1.25, 1.25]


def test_a_start_takes_its_own_time_and_no_steps_time() -> None:
    """The start of a worker that replaces a dead one, in a cluster whose steps are slow."""
    slow = StepTimes(5.0, {"prefill": 1.0, "decode": 1.0}, (0.5, 1.5))
    scenario = simulated.scenario(1, 2, failures=[("decode-0", 1.0)], delays=NONE)
    report = simulated.run(
        replace(scenario, times={"prefill": slow, "decode": slow}),
        [request(0.5 * number, 40, 2, 7 + number) for number in range(30)],
    )
    assert report.timeline is not None
    samples = report.timeline.samples
    few = [one.at_s for one in samples if one.pools["decode"].workers < 2]
    assert max(few) - min(few) == pytest.approx(COSTS.start_s, abs=1.0)


def test_without_cores_nobody_has_a_neighbour() -> None:
    times: dict[PoolName, StepTimes] = {
        pool: StepTimes(1.5, {"prefill": 9, "decode": 9}) for pool in POOLS
    }
    assert finished([(0, 2, "prefill"), (0, 4, "decode")], None, times) == [2, 4]


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.sampled_from(POOLS)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
)
def test_cores_do_no_more_than_they_can(tasks: list[tuple[float, float, Kind]], cores: int) -> None:
    ends = finished(tasks, cores, as_profiled())
    for (at, seconds, _), end in zip(tasks, ends, strict=True):
        # Never faster than alone, never slower than all of them one after the other.
        assert end >= at + seconds - 1e-9
        assert end <= max(at for at, _, _ in tasks) + sum(one for _, one, _ in tasks) + 1e-9
    # The work of any moment up to the last end fits into the cores.
    first = min(at for at, _, _ in tasks)
    assert sum(one for _, one, _ in tasks) <= cores * (max(ends) - first) + 1e-9
    if len(tasks) <= cores:
        assert ends == [pytest.approx(at + seconds) for at, seconds, _ in tasks]


def request(at: float, prompt: int, answer: int, seed: int) -> PlannedRequest:
    tokens = tuple((number * seed) % simulated.VOCAB for number in range(prompt))
    return PlannedRequest(at, None, tokens, answer, seed)


def run(cores: int | None, plan: list[PlannedRequest], **times: Any) -> list[Any]:
    config = {"slo": None, "kv": {"memory": "64MiB"}}
    cluster = replace(
        simulated.scenario(1, 1, config=config, delays=NONE),
        cores=cores,
        times=as_profiled() | times,
    )
    return list(simulated.run(cluster, plan).rows)


def test_a_prompt_slows_the_answer_beside_it() -> None:
    # A short local prompt decodes while a long one is computed by the prefill worker.
    plan = [request(0.0, 40, 100, 7), request(0.5, 4000, 1, 11)]
    alone, _ = run(2, plan)
    beside, long = run(2, plan, decode=StepTimes(1.0, {"prefill": 1.5, "decode": 1.0}))
    assert long.ledger is not None
    window = 0.5, 0.5 + dict(long.ledger.phases)["prefill"]
    at, slowed = beside.ttft_s, 0
    for before, after in zip(alone.itl_s, beside.itl_s, strict=True):
        inside = window[0] <= at and at + after <= window[1]
        at += after
        if inside:
            slowed += 1
            assert after == pytest.approx(1.5 * before, rel=0.02)
        elif not window[0] - 0.1 < at < window[1] + 0.1:
            assert after == pytest.approx(before, rel=0.02)
    assert slowed > 5


def test_one_core_takes_as_long_as_all_steps_together() -> None:
    plan = [request(0.0, 40, 50, 7), request(0.2, 4000, 1, 11)]
    free, shared = run(None, plan), run(1, plan)
    assert shared[1].e2e_s > free[1].e2e_s * 1.3
    assert sum(shared[0].itl_s) > sum(free[0].itl_s) * 1.3


def test_a_worker_that_starts_uses_a_core() -> None:
    """The answer beside the start of a worker that replaces a dead one."""
    plan = [request(0.0, 40, 400, 7)]
    config = {"slo": None, "kv": {"memory": "64MiB"}}
    scenario = simulated.scenario(1, 2, config=config, delays=NONE, failures=[("decode-1", 1.0)])
    rows = simulated.run(replace(scenario, cores=1), plan).rows
    calm = simulated.run(scenario, plan).rows
    # Five seconds of start at half the speed take ten, in which the answer advances by five.
    assert rows[0].e2e_s - calm[0].e2e_s == pytest.approx(
        min(COSTS.start_s, calm[0].e2e_s - 1.0), rel=0.05
    )
