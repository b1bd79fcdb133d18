"""A pool that lost its workers gets room again, although others wait for every free place."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product

import pytest
from support.actuator_fleet import Cluster, Fleet

from autoscaler.actuator import Actuator
from autoscaler.rebalancing import PoolWorkers
from autoscaler.starved_pool import ROOM_S, starved_pool
from kvrelay.clock import ManualClock
from kvrelay.state.registry import Registry
from kvrelay.types.workers import PoolName, Role


@dataclass
class SmallFleet(Fleet):
    """Has `room` places. A free place goes at once to the worker that waits longest, as in Ray."""

    room: int = 4

    async def start(self, pool: Role, worker_id: str) -> None:
        await super().start(pool, worker_id)
        if len(self.pools) - len(self.without_room) > self.room:
            self.without_room.add(worker_id)

    async def die(self, worker_id: str) -> None:
        had_place = worker_id not in self.without_room
        await super().die(worker_id)
        self.without_room.discard(worker_id)
        waiting = [one for one in self.pools if one in self.without_room]
        if had_place and waiting:
            self.without_room.remove(waiting[0])

    async def beat(self, *, but: tuple[str, ...] = ()) -> None:
        await super().beat(but=(*but, *self.without_room))

    def placed(self, pool: PoolName) -> list[str]:
        return [
            one for one, role in self.pools.items() if role == pool and one not in self.without_room
        ]


@asynccontextmanager
async def small_cluster(
    registry: Registry, room: int, sizes: dict[PoolName, int]
) -> AsyncIterator[tuple[Cluster, SmallFleet]]:
    fleet, clock = SmallFleet(registry, room=room), ManualClock()
    yield Cluster(registry, fleet, clock, Actuator(registry, fleet, sizes, clock=clock)), fleet
    for worker_id in list(fleet.pools):
        await fleet.die(worker_id)


async def settled(cluster: Cluster) -> None:
    for _ in range(12):
        await cluster.tick()
        cluster.clock.advance(ROOM_S / 2)


@pytest.mark.parametrize("end", ["dies", "is drained"])
async def test_the_last_decode_worker_comes_back_while_prefill_workers_wait(
    registry: Registry, end: str
) -> None:
    async with small_cluster(registry, 4, {"prefill": 2, "decode": 1}) as (cluster, fleet):
        await settled(cluster)
        await registry.set_desired({"prefill": 9})
        await settled(cluster)
        assert (len(fleet.placed("prefill")), len(fleet.placed("decode"))) == (3, 1)
        (last,) = fleet.placed("decode")
        if end == "dies":
            await fleet.die(last)
        else:
            await registry.request_drain(last)
        await settled(cluster)
        assert (len(fleet.placed("prefill")), len(fleet.placed("decode"))) == (3, 1)
        assert fleet.placed("decode") != [last]
        assert len(fleet.without_room) == 6, "the others wait again"


async def test_workers_that_serve_stay_if_a_drain_makes_room(registry: Registry) -> None:
    async with small_cluster(registry, 3, {"prefill": 2, "decode": 1}) as (cluster, fleet):
        await settled(cluster)
        await registry.request_drain("decode-0")
        await settled(cluster)
        assert len(fleet.placed("decode")) == 1
        assert sorted(fleet.placed("prefill")) == ["prefill-0", "prefill-1"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sweep(3)
async def test_no_pool_stays_without_a_worker_that_another_could_give_up(
    registry: Registry, seed: int
) -> None:
    draw = random.Random(seed)
    room = draw.randrange(1, 6)
    async with small_cluster(registry, room, {"prefill": 1, "decode": 1}) as (cluster, fleet):
        for _ in range(6):
            match draw.randrange(3):
                case 0:
                    sizes: dict[PoolName, int] = {"prefill": draw.randrange(8)}
                    await registry.set_desired(sizes | {"decode": draw.randrange(1, 8)})
                case 1:
                    for one in draw.sample(sorted(fleet.pools), min(2, len(fleet.pools))):
                        await fleet.die(one)
                case 2:
                    for one in draw.sample(sorted(fleet.pools), min(1, len(fleet.pools))):
                        await registry.request_drain(one)
            await settled(cluster)
            await settled(cluster)
            wanted = await registry.desired()
            placed = {pool: len(fleet.placed(pool)) for pool in wanted}
            assert placed["decode"] >= 1
            assert placed["prefill"] >= min(1, wanted["prefill"], room - 1)
            assert sum(placed.values()) == min(room, sum(wanted.values())), "no place is left empty"


def pool(placed: int, pending: int) -> PoolWorkers:
    names = [f"w-{number}" for number in range(placed + pending)]
    return PoolWorkers(9, names, names[:placed], names[placed:])


def test_two_pools_never_take_turns() -> None:
    for prefill, decode, waiting, also in product(range(4), range(4), range(3), range(3)):
        pools: dict[PoolName, PoolWorkers] = {
            "prefill": pool(prefill, waiting),
            "decode": pool(decode, also),
        }
        found = starved_pool(pools)
        if found is None:
            continue
        starved, giver = found
        after = {
            starved: pool(1, 0),
            giver: pool(len(pools[giver].placed) - 1, 1),
        }
        assert starved_pool(after) is None  # type: ignore[arg-type]
