"""Both pools looked at together, and which workers change over."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.pool_sizes import decide_pools
from autoscaler.rebalancing import PoolWorkers, workers_to_switch
from autoscaler.scaling_policy import PoolSnapshot, PoolState
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo, WorkerLoad


def rules(rebalance: bool = True, **bounds: int) -> AutoscalingPolicy:
    pool = {
        "max_replicas": 4,
        "metrics": [{"name": "queue_depth", "target": 2}],
        "upscale_delay_s": 5,
        "downscale_delay_s": 60,
        **bounds,
    }
    return AutoscalingPolicy.model_validate(
        {"rebalance": rebalance, "prefill": pool, "decode": pool}
    )


def run(
    policy: AutoscalingPolicy,
    queues: Mapping[PoolName, float],
    sizes: dict[PoolName, int],
    seconds: int,
) -> dict[PoolName, str]:
    """Changes `sizes` as decided, a look each second; the last reasons for a change."""
    states: dict[PoolName, PoolState] = {}
    reasons: dict[PoolName, str] = {}
    for now in range(seconds):
        seen = {
            pool: PoolSnapshot(sizes[pool], sizes[pool], {"queue_depth": queues[pool]})
            for pool in POOLS
        }
        for pool, (decision, state) in decide_pools(seen, policy, states, float(now)).items():
            states[pool] = state
            if decision.desired != sizes[pool]:
                sizes[pool], reasons[pool] = decision.desired, decision.reason
    return reasons


def test_a_pool_that_grows_takes_what_the_other_has_to_spare() -> None:
    sizes: dict[PoolName, int] = {"prefill": 2, "decode": 1}
    reasons = run(rules(), {"prefill": 1, "decode": 3}, sizes, 6)
    assert sizes == {"prefill": 1, "decode": 2}
    assert reasons["decode"] == "queue_depth 3 over 1 worker / target 2 → 2"
    assert reasons["prefill"] == (
        "queue_depth 1 over 2 workers / target 2 → 1, not yet for downscale_delay_s 60; "
        "1 of 2 can be spared, and decode grows"
    )


@pytest.mark.parametrize(
    ("policy", "queues", "after"),
    [
        (rules(rebalance=False), {"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2}),
        (rules(), {"prefill": 4, "decode": 3}, {"prefill": 2, "decode": 2}),  # it needs both
        (rules(min_replicas=2), {"prefill": 0, "decode": 3}, {"prefill": 2, "decode": 2}),
        (rules(), {"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1}),  # nobody grows
    ],
    ids=["off", "busy", "min_replicas", "nobody grows"],
)
def test_nothing_is_given_without_need_or_right(
    policy: AutoscalingPolicy, queues: Mapping[PoolName, float], after: Mapping[PoolName, int]
) -> None:
    sizes: dict[PoolName, int] = {"prefill": 2, "decode": 1}
    run(policy, queues, sizes, 6)
    assert sizes == after


def test_what_is_spared_has_not_been_needed_for_as_long_as_the_other_had_to_wait() -> None:
    policy, states = rules(), dict[PoolName, PoolState]()
    sizes = []
    for now in range(12):
        queue = {"prefill": 4 if now in (0, 1, 2, 3) else 0, "decode": 3}
        seen = {
            pool: PoolSnapshot(2 if pool == "prefill" else 1, 1, {"queue_depth": queue[pool]})
            for pool in POOLS
        }
        found = decide_pools(seen, policy, states, float(now))
        states = {pool: state for pool, (_, state) in found.items()}
        sizes.append((found["prefill"][0].desired, found["decode"][0].desired))
    assert sizes == [(2, 1)] * 5 + [(2, 2)] * 4 + [(1, 2)] * 3


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_rebalancing_keeps_to_the_bounds(
    load: list[tuple[int, int]], prefill: int, decode: int
) -> None:
    policy, states = rules(min_replicas=1), dict[PoolName, PoolState]()
    sizes: dict[PoolName, int] = {"prefill": prefill, "decode": decode}
    for now, queues in enumerate(load):
        seen = {
            pool: PoolSnapshot(sizes[pool], sizes[pool], {"queue_depth": queue})
            for pool, queue in zip(POOLS, queues, strict=True)
        }
        for pool, (decision, state) in decide_pools(seen, policy, states, float(now)).items():
            assert 1 <= decision.desired <= 4
            states[pool], sizes[pool] = state, decision.desired


def members(
    size: int, *staying: str, starting: tuple[str, ...] = (), pending: tuple[str, ...] = ()
) -> PoolWorkers:
    return PoolWorkers(size, (*staying, *starting, *pending), staying, pending)


def info(worker_id: str, running: int = 0) -> WorkerInfo:
    load = WorkerLoad(running=running)
    return WorkerInfo(
        worker_id, "prefill", 1, "ready", "127.0.0.1:1", "demo", "00", 16, 64, "host", 4096, load
    )


INFOS = {
    one: info(one, running)
    for one, running in (("prefill-0", 0), ("prefill-1", 2), ("prefill-2", 1))
}
THREE = ("prefill-0", "prefill-1", "prefill-2")


@pytest.mark.parametrize(
    ("giver", "taker", "over"),
    [
        (members(2, *THREE), members(2, "decode-0"), ["prefill-0"]),  # the emptiest
        # One is missing, the other is stopped
        (members(1, *THREE), members(2, "decode-0"), ["prefill-0"]),
        (members(1, *THREE), members(3, "decode-0"), ["prefill-0", "prefill-2"]),
        (members(3, *THREE), members(2, "decode-0"), []),  # nothing to spare
        (members(2, *THREE), members(1, "decode-0"), []),  # nobody is missing
        # It comes already
        (members(2, *THREE), members(2, "decode-0", starting=("decode-1",)), []),
        # It may never come
        (members(2, *THREE), members(2, "decode-0", pending=("decode-1",)), ["prefill-0"]),
        # A start is cancelled
        (members(1, "prefill-0", starting=("prefill-1",)), members(2, "decode-0"), []),
    ],
)
def test_who_changes_over(giver: PoolWorkers, taker: PoolWorkers, over: list[str]) -> None:
    assert workers_to_switch(giver, taker, INFOS) == over
