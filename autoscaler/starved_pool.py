"""Room for a pool without a placed worker: another pool gives up one of its workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from autoscaler.rebalancing import PoolWorkers
from kvrelay.types.workers import PoolName

# Time for a new worker to take the place that a worker was told to leave, in seconds, before
# another worker has to leave.
ROOM_S = 10.0


def starved_pool(pools: Mapping[PoolName, PoolWorkers]) -> tuple[PoolName, PoolName] | None:
    """Returns the pool whose workers all wait for room, and the pool that gives it up; None if no
    pool has to.

    The decode pool comes first, since decode workers can serve every request alone. It gives up
    none of its last workers, so two pools never take turns.
    """
    orders: tuple[tuple[PoolName, PoolName, int], ...] = (
        ("decode", "prefill", 0),
        ("prefill", "decode", 1),
    )
    for starved, giver, kept in orders:
        if starved in pools and giver in pools:
            waits = pools[starved].pending and not pools[starved].placed
            if waits and len(pools[giver].placed) > kept:
                return starved, giver
    return None
