"""Joint decision about the sizes of both pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoscaler.scaling_policy import (
    Decision,
    PoolSnapshot,
    PoolState,
    decide,
    highest_recommendation,
)
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.types.workers import PoolName

Verdicts = dict[PoolName, tuple[Decision, PoolState]]


def decide_pools(
    seen: Mapping[PoolName, PoolSnapshot],
    policy: AutoscalingPolicy,
    states: Mapping[PoolName, PoolState],
    now: float,
) -> Verdicts:
    """Returns the decision of `decide` for each pool in `seen` that has a policy. With `rebalance`,
    a growing pool takes the other pool's spare workers.
    """
    found: Verdicts = {}
    for pool, snapshot in seen.items():
        rules = policy.pool(pool)
        if rules is not None:
            found[pool] = decide(snapshot, rules, states.get(pool), now)
    if policy.rebalance and len(found) == 2:
        _rebalance("prefill", "decode", seen, policy, found, now)
        _rebalance("decode", "prefill", seen, policy, found, now)
    return found


def _rebalance(
    giver: PoolName,
    taker: PoolName,
    seen: Mapping[PoolName, PoolSnapshot],
    policy: AutoscalingPolicy,
    found: Verdicts,
    now: float,
) -> None:
    """Shrinks the giver by the workers that the taker needs.

    The giver need not wait for its own downscale_delay_s: a role change keeps the loaded weights
    and can be reverted. The giver must have had spare workers for the taker's upscale_delay_s.
    """
    wants = found[taker][0].desired - seen[taker].size
    decision, state = found[giver]
    size = seen[giver].size
    taker_rules, giver_rules = policy.pool(taker), policy.pool(giver)
    assert taker_rules is not None, "it has a decision"
    assert giver_rules is not None, "it has a decision"
    if wants <= 0 or decision.desired != size:
        return
    spare = size - highest_recommendation(state, now - taker_rules.upscale_delay_s)
    gives = min(wants, spare, giver_rules.max_step_down)
    if gives > 0:
        reason = f"{decision.reason}; {gives} of {size} can be spared, and {taker} grows"
        found[giver] = replace(decision, desired=size - gives, reason=reason), state
