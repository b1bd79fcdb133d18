"""Replays a scaling policy over a recording: its decision at each moment, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscaler.pool_sizes import decide_pools
from autoscaler.scaling_policy import PoolSnapshot, PoolState
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.types.workers import PoolName


@dataclass(frozen=True, slots=True)
class Moment:
    """Snapshots of the pools at one time, with their sizes at that time."""

    # Seconds after the start of the recording.
    at: float
    pools: Mapping[PoolName, PoolSnapshot]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's decision for one pool at one moment; sizes in workers."""

    at: float
    pool: PoolName
    before: int
    after: int
    reason: str
    # Its size is the size that the policy had set, not the recorded size.
    seen: PoolSnapshot


class Replay:
    """Owns the sizes that the policy sets and the policy's state during a replay.

    Metrics stay as recorded: a recorded queue remains even if the policy grows the pool. So sizes
    from totals (`queue_*`) are right for the recorded load. Other sizes approach recorded size x
    value / target.
    """

    def __init__(self, policy: AutoscalingPolicy) -> None:
        self._policy = policy
        self._sizes: dict[PoolName, int] = {}
        self._states: dict[PoolName, PoolState] = {}

    def decide(self, moment: Moment) -> list[Verdict]:
        """Applies the policy to the next moment. Returns a verdict for each recorded pool that has
        a policy.
        """
        seen = {
            pool: replace(recorded, size=self._sizes.get(pool, recorded.size))
            for pool, recorded in moment.pools.items()
        }
        verdicts = []
        for pool, (decision, state) in decide_pools(
            seen, self._policy, self._states, moment.at
        ).items():
            self._states[pool], self._sizes[pool] = state, decision.desired
            verdicts.append(
                Verdict(
                    moment.at, pool, seen[pool].size, decision.desired, decision.reason, seen[pool]
                )
            )
        return verdicts
