"""Two hundred histories of a whole cluster, and proof that they hold what they are meant to
survive.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from simulation.clients import STATES
from simulation.history import UPGRADES
from simulation.run import run_seed
from simulation.simulation import Result, Simulation

SEEDS = 200
CHUNK = 20
UPGRADED = 5000  # the first seed of those that have an upgrade of the model besides
LEAST = 2  # seeds of the suite that must have each fault
RARE = {  # and these only now and then
    "client left while finishing",
    "Redis is read-only",
    "send a KV frame twice",
}
HAPPENINGS = {
    "kill a prefill worker",
    "kill a decode worker",
    "kill a worker at a token",
    "kill a prefill worker in mid-push",
    "kill a decode worker in mid-push",
    "kill a decode worker as it commits",
    "kill the router",
    "freeze a worker",
    "freeze a worker until it is given up",
    "freeze the router",
    "freeze an end of a push",
    "freeze a controller",
    "kill a controller",
    "a lease expired",
    "terminate a worker",
    "terminate a worker at once",
    "restart the workers",
    *UPGRADES,
    "Redis is stale",
    "slow a worker down",
    "cut a worker from the router, one way",
    "cut a worker from the router, both ways",
    "cut prefill from decode, one way",
    "cut prefill from decode, both ways",
    "cut from Redis, one way",
    "cut from Redis, both ways",
    "keepalive ended a connection",
    "slow a link",
    "reset a session",
    "flip a bit of a KV frame",
    "truncate a KV frame",
    "send a KV frame twice",
    "lose a KV frame",
    "swap two KV frames",
    "lose a receipt",
    "give a command twice",
    "tell an event twice",
    "lose a cache update",
    "tell a cache update twice",
    "swap two cache updates",
    "garble a cache update",
    "Redis is gone",
    "Redis stalls",
    "Redis is read-only",
    "Redis is flushed",
    "Redis loses its last writes",
    "drain a worker",
    "scale the pools",
    "swap a worker",
    "a request killed its worker",
    "a sequence was preempted",
    "a block had the hash of another prompt's",
    "a request gave way to another tenant",
    "a worker changed its pool",
    "a standby worker joined a pool",
    *(f"client left while {state}" for state in STATES),
}


@cache
def _result(seed: int) -> Result:
    return run_seed(seed)


@pytest.fixture(autouse=True)
def _collected_between_histories() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_happens_nothing_is_lost_or_wrong(first: int) -> None:
    """`python tests/simulation/run.py --seed N --trace` tells what happened in a seed that
    fails.
    """
    failed = {
        seed: _result(seed).complaints
        for seed in range(first, first + CHUNK)
        if _result(seed).complaints
    }
    assert not failed


@pytest.mark.long
def test_no_answer_mixes_two_versions_of_a_model() -> None:
    """A rolling upgrade of the model, and mostly back again, in each history."""
    results = [
        Simulation(seed, also=["upgrade"]).run() for seed in range(UPGRADED, UPGRADED + CHUNK)
    ]
    failed = {one.seed: one.complaints for one in results if one.complaints}
    assert not failed
    outcomes = sum((one.outcomes for one in results), Counter[str]())
    assert outcomes["length"] + outcomes["stop"] > 0.6 * outcomes.total()


@pytest.mark.long
def test_each_fault_happens() -> None:
    seeds: Counter[str] = Counter()
    for seed in range(SEEDS):
        seeds.update(_result(seed).faults.keys())
    missing = {one: seeds[one] for one in HAPPENINGS if seeds[one] < (1 if one in RARE else LEAST)}
    assert not missing
    unknown = seeds.keys() - HAPPENINGS
    assert not unknown, "name it above, so that it cannot stop to happen without notice"


@pytest.mark.long
def test_most_requests_end_well() -> None:
    """So that nothing is proven by a cluster that refuses everything."""
    outcomes = sum((_result(seed).outcomes for seed in range(SEEDS)), Counter[str]())
    assert outcomes["length"] + outcomes["stop"] > 0.7 * outcomes.total()
    for outcome in (
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
    ):
        assert outcomes[outcome], outcome


def test_one_seed_is_one_history() -> None:
    assert Simulation(3).run().trace == _result(3).trace
    assert _result(3).trace != _result(4).trace


@pytest.mark.long
def test_a_history_is_the_same_in_another_process() -> None:
    script = str(Path(__file__).parent / "run.py")
    done = subprocess.run(
        [sys.executable, script, "--seed", "7", "--trace"],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert f"trace {_result(7).trace};" in done.stdout
