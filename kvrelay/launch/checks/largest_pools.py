"""The largest pools that an autoscaling policy allows, and the memory that they take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.launch.checks.memory_plan import PoolMemory
from kvrelay.planning.auto_kv_memory import PROCESS_BYTES
from kvrelay.types.workers import PoolName


@dataclass(frozen=True, slots=True)
class LargestPools:
    """The workers of a cluster that its policy has scaled up as far as it may."""

    sizes: dict[PoolName, int]
    # Loaded workers without a pool.
    standby: int
    # Of all workers: weights, KV, host tiers and processes, in bytes.
    num_bytes: int

    def __str__(self) -> str:
        parts = (*self.sizes.items(), ("standby", self.standby))
        return ", ".join(f"{name} {count}" for name, count in parts if count)


def largest_pools(pools: Sequence[PoolMemory], policy: AutoscalingPolicy | None) -> LargestPools:
    """Returns the largest pools under the policy. Without a policy, pools keep their sizes.

    A standby worker has the memory of a decode worker: it may join either pool.
    """
    sizes: dict[PoolName, int] = {}
    standby = 0 if policy is None else policy.standby
    total = 0
    for one in pools:
        rules = None if policy is None else policy.pool(one.pool)
        # A pool above max_replicas shrinks, but only after its start.
        sizes[one.pool] = one.workers if rules is None else max(one.workers, rules.max_replicas)
        count = sizes[one.pool] + (standby if one.pool == "decode" else 0)
        total += count * (one.worker_bytes + PROCESS_BYTES)
    return LargestPools(sizes, standby, total)
