"""Shipped policies over the model of the pools: at constant load they settle, after a step the
right pool follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from autoscaler import scaling_policy as rules
from autoscaler.queueing_model import QueueingModel, Requests, WorkerSpeed
from autoscaler.replay import Moment, Replay
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_policy
from kvrelay.types.workers import POOLS, PoolName

FOLDER = Path(__file__).parents[3] / "configs" / "autoscaling"
POLICIES = {name: load_policy(FOLDER / f"{name}.yaml") for name in ("queue-depth", "slo")}
SPEED = WorkerSpeed(
    prefill_tokens_per_s=4000,
    decode_tokens_per_s=800,
    itl_s=0.01,
    max_batch=16,
    kv_tokens=50_000,
    start_s=10,
)
Load = tuple[float, float, float]  # requests per second, prompt tokens, answer tokens
MINUTE = 60
LOADS: list[Load] = [
    *((rate, 400, 8) for rate in (2, 9, 12, 18)),
    *((rate, 1500, 60) for rate in (1.5, 3)),
    *((rate, 50, 300) for rate in (1, 2.75, 3.5, 5)),
]


def sizes_under(
    policy: AutoscalingPolicy, load: Sequence[Load], first: int = 1
) -> dict[PoolName, list[int]]:
    """Of each pool, at a look each second of the load."""
    cluster, replay = QueueingModel(SPEED, first, first), Replay(policy)
    sizes: dict[PoolName, list[int]] = {pool: [first] for pool in POOLS}
    for second, (rate, prompt, answer) in enumerate(load, 1):
        pools = cluster.step(Requests(rate, rate * prompt, rate * answer), 1.0)
        for verdict in replay.decide(Moment(float(second), pools)):
            cluster.resize(verdict.pool, verdict.after)
            sizes[verdict.pool].append(verdict.after)
    return sizes


def turns(sizes: Sequence[int]) -> int:
    changes = [after - before for before, after in pairwise(sizes) if after != before]
    return sum(one * other < 0 for one, other in pairwise(changes))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("first", [1, 4])
def test_at_constant_load_a_pool_settles(name: str, first: int) -> None:
    wrong = {}
    for load in LOADS:
        sizes = sizes_under(POLICIES[name], [load] * (30 * MINUTE), first)
        # At first a queue may grow it further than it takes to serve what comes once the queue is
        # gone.
        wrong |= {(load, pool): sizes[pool][::MINUTE] for pool in POOLS if turns(sizes[pool]) > 1}
    assert not wrong


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.long
def test_without_regard_to_what_is_in_use_they_flap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above does not hold for want of a load that makes them."""
    monkeypatch.setattr(rules, "least_size", lambda load: 0)
    flapped = [
        max(turns(sizes_under(POLICIES[name], [load] * (30 * MINUTE))[pool]) for pool in POOLS)
        for load in LOADS
    ]
    assert max(flapped) > 5


STEPS = {"prefill": ((1, 700, 8), (8, 700, 8)), "decode": ((0.6, 100, 400), (3.6, 100, 400))}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("pool", POOLS)
def test_the_right_pool_follows_a_step(name: str, pool: PoolName) -> None:
    low, high = STEPS[pool]
    sizes = sizes_under(
        POLICIES[name], [low] * (5 * MINUTE) + [high] * (10 * MINUTE) + [low] * (60 * MINUTE)
    )
    other = POOLS[pool == "prefill"]
    assert set(sizes[other]) == {1}
    assert max(sizes[pool]) > 1
    assert turns(sizes[pool]) == 1
    assert sizes[pool][5 * MINUTE] == sizes[pool][-1] == 1
