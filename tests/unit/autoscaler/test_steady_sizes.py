"""Pools at random constant loads: once settled, they keep their sizes.

A pool may shrink by one worker every `downscale_delay_s`, so a policy without a regard to the load
changes a size dozens of times an hour. Where requests arrive evenly, no size may change after
SETTLED_S. Where they arrive at random, a burst may grow a pool once an hour, and the pool shrinks
again.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from support.prompt_pool import PromptPool, Prompts

from autoscaler.pool_sizes import decide_pools
from autoscaler.queueing_model import QueueingModel, Requests, WorkerSpeed
from autoscaler.replay import Moment, Replay
from autoscaler.scaling_policy import PoolState
from autoscaler.snapshot import snapshot
from kvrelay.config.config_file import load_policy
from kvrelay.types.workers import POOLS, PoolName

FOLDER = Path(__file__).parents[3] / "configs" / "autoscaling"
POLICIES = {name: load_policy(FOLDER / f"{name}.yaml") for name in ("queue-depth", "slo")}
# A pool of 8 shrinks to 1 in 35 minutes by slo.yaml.
SETTLED_S = MEASURED_S = 3600.0
EVENLY, AT_RANDOM = 0, 2
# Seconds of a prompt on a worker that suit the policy: one that waits for another stays within the
# target of TTFT, and downscale_delay_s sees many of them.
PROMPT_S = {"queue-depth": (0.05, 3.0), "slo": (0.05, 0.15)}


def between(rng: random.Random, low: float, high: float) -> float:
    """Of each order of magnitude alike."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def random_speed(rng: random.Random, request_tokens: float) -> WorkerSpeed:
    """Steps of a batch that take from as long as those of a single sequence to as long as all its
    sequences one after the other.
    """
    max_batch, itl_s = rng.choice([4, 8, 16, 32, 64, 128]), between(rng, 0.005, 0.08)
    return WorkerSpeed(
        prefill_tokens_per_s=between(rng, 1000, 40_000),
        decode_tokens_per_s=between(rng, 1.2, max_batch) / itl_s,
        itl_s=itl_s,
        max_batch=max_batch,
        kv_tokens=int(max(between(rng, 20_000, 500_000), 8 * request_tokens)),
        start_s=rng.uniform(2, 40),
    )


def changes_of_both_pools(name: str, seed: int, *, evenly: bool) -> dict[PoolName, int]:
    """Changes of the sizes after SETTLED_S, under a load of up to 3.5 workers of one pool."""
    rng, policy = random.Random(seed), POLICIES[name]
    prompt, answer = between(rng, 20, 4000), between(rng, 8, 800)
    speed = random_speed(rng, prompt + answer)
    fit = min(speed.max_batch, speed.kv_tokens / (prompt + answer / 2))
    rate = rng.uniform(0.05, 3.5) * min(
        speed.prefill_tokens_per_s / prompt, fit / speed.inter_token_s(fit) / answer
    )
    first = rng.randint(1, 4)
    cluster, replay = QueueingModel(speed, first, first), Replay(policy)
    sizes: dict[PoolName, list[int]] = {pool: [] for pool in POOLS}
    now, arrival = 0.0, rng.expovariate(rate)
    while now < SETTLED_S + MEASURED_S:
        now, number = now + policy.interval_s, rate * policy.interval_s
        if not evenly:
            number = 0
            while arrival < now:
                arrival, number = arrival + rng.expovariate(rate), number + 1
        pools = cluster.step(Requests(number, number * prompt, number * answer), policy.interval_s)
        for verdict in replay.decide(Moment(now, pools)):
            cluster.resize(verdict.pool, verdict.after)
            if now > SETTLED_S:
                sizes[verdict.pool].append(verdict.after)
    return {pool: changes(of_pool) for pool, of_pool in sizes.items()}


def changes_of_prefill(name: str, seed: int) -> int:
    """The same for prompts that wait for one of several workers."""
    rng, policy = random.Random(seed), POLICIES[name]
    seconds = between(rng, *PROMPT_S[name])
    load = Prompts(
        rate=rng.uniform(0.1, 3.2) / seconds,
        tokens=between(rng, 50, 1500),
        spread=rng.choice([0.0, 0.5, 1.0]),
        seconds=seconds,
    )
    size = rng.randint(1, 4)
    pool = PromptPool(load, size, start_s=rng.uniform(2, 40), seed=seed)
    states: dict[PoolName, PoolState] = {}
    sizes = []
    while pool.now < SETTLED_S + MEASURED_S:
        pool.advance(policy.interval_s)
        seen = snapshot("prefill", size, pool.infos(), [pool.router()])
        decision, states["prefill"] = decide_pools({"prefill": seen}, policy, states, pool.now)[
            "prefill"
        ]
        if decision.desired != size:
            size = decision.desired
            pool.resize(size)
        if pool.now > SETTLED_S:
            sizes.append(size)
    return changes(sizes)


def changes(sizes: list[int]) -> int:
    return sum(before != after for before, after in pairwise(sizes))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.long
def test_no_size_changes_while_requests_arrive_evenly(name: str) -> None:
    found = {seed: changes_of_both_pools(name, seed, evenly=True) for seed in range(20)}
    assert not {seed: of for seed, of in found.items() if max(of.values()) > EVENLY}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.long
def test_bursts_seldom_change_a_size(name: str) -> None:
    found = {seed: changes_of_both_pools(name, seed, evenly=False) for seed in range(20)}
    assert not {seed: of for seed, of in found.items() if max(of.values()) > AT_RANDOM}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.long
def test_prompts_at_random_times_seldom_change_the_prefill_pool(name: str) -> None:
    found = {seed: changes_of_prefill(name, seed) for seed in range(8)}
    assert not {seed: number for seed, number in found.items() if number > AT_RANDOM}
