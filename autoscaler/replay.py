"""A policy over a record: what it would have decided at each moment, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscaler.pool_sizes import decide_pools
from autoscaler.scaling_policy import PoolSnapshot, PoolState
from kvrelay.config.schema import AutoscalingPolicy
from kvrelay.types import PoolName


@dataclass(frozen=True, slots=True)
class Moment:
    """The pools at one time, with the sizes that they had then."""

    at: float  # seconds after the record's start
    pools: Mapping[PoolName, PoolSnapshot]


@dataclass(frozen=True, slots=True)
class Verdict:
    at: float
    pool: PoolName
    before: int
    after: int
    reason: str
    seen: PoolSnapshot  # with the size that the policy had set, not the recorded one


class Replay:
    """Owns the sizes that the policy sets and the policy's memory, while moments go by.

    Metrics stay as they were recorded, whatever the policy does: a queue that a larger pool would
    not have had is there all the same. So sizes that follow from totals are right for the recorded
    load, and others approach the recorded pool's size times value / target.
    """

    def __init__(self, policy: AutoscalingPolicy) -> None:
        self._policy = policy
        self._sizes: dict[PoolName, int] = {}
        self._states: dict[PoolName, PoolState] = {}

    def look(self, moment: Moment) -> list[Verdict]:
        """One for each pool that is in the record and has a policy."""
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
