"""Standby workers: of no pool, until a pool misses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actuator_fleet import Cluster, running_cluster

from autoscaler.rebalancing import standbys_to_join
from autoscaler.worker_watch import SILENT_S, START_S
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, PoolName

INTERVAL_S = 0.5  # the actuator's own


@pytest.fixture
async def cluster(registry: Registry) -> AsyncIterator[Cluster]:
    """1 prefill worker, 1 decode worker, and 1 that stands by."""
    async with running_cluster(registry, {"prefill": 1, "decode": 1}, standby=1) as made:
        assert await made.tick(3) == ["decode-0", "prefill-0", "standby-0"]
        await made.actuator.tick()
        yield made


async def members(cluster: Cluster, pool: PoolName) -> list[str]:
    """Ready workers of the pool, by name."""
    return [
        one.worker_id
        for one in await cluster.registry.workers()
        if (one.pool, one.state) == (pool, "ready")
    ]


async def test_standbys_start_once_the_pools_are_complete(registry: Registry) -> None:
    async with running_cluster(registry, {"prefill": 1, "decode": 1}, standby=2) as cluster:
        cluster.fleet.first_state = "starting"
        assert await cluster.tick(4) == ["decode-0", "prefill-0"], (
            "their starts have the cores for themselves"
        )
        for worker in cluster.fleet.workers.values():
            worker.is_now("ready")
        await cluster.fleet.beat()
        assert await cluster.tick() == ["decode-0", "prefill-0", "standby-0", "standby-1"]
        assert await cluster.tick(4) == ["decode-0", "prefill-0", "standby-0", "standby-1"]
        assert await registry.desired() == {"prefill": 1, "decode": 1}, (
            "they are no pool's capacity"
        )
        assert sorted(info.worker_id for info in await registry.workers()) == [
            "decode-0",
            "prefill-0",
        ]


@pytest.mark.parametrize("pool", POOLS)
async def test_a_standby_takes_the_place_of_the_dead_and_is_replaced(
    cluster: Cluster, pool: PoolName
) -> None:
    await cluster.fleet.die(f"{pool}-0")
    await cluster.actuator.tick()
    assert cluster.fleet.turned == ["standby-0"], "in the very look that sees the death"
    assert cluster.fleet.pools["standby-0"] == pool
    assert await cluster.registry.standbys() == ()
    assert f"{pool}-1" not in cluster.fleet.pools, "nothing else is started for it"
    await cluster.fleet.beat()
    assert await members(cluster, pool) == ["standby-0"]
    assert "standby-1" in await cluster.tick(2)
    assert len(await cluster.tick(4)) == 3


async def test_the_next_standby_waits_until_the_last_has_joined(cluster: Cluster) -> None:
    cluster.fleet.first_state = "starting"
    await cluster.fleet.die("decode-0")
    assert await cluster.tick(5) == ["prefill-0", "standby-0"], (
        "a start would take the cores that it needs"
    )
    cluster.fleet.workers["standby-0"].is_now("ready")
    await cluster.fleet.beat()
    assert await cluster.tick(1) == ["prefill-0", "standby-0", "standby-1"]


async def test_decode_gets_the_last_standby_when_both_pools_lose_a_worker(cluster: Cluster) -> None:
    await cluster.fleet.die("prefill-0")
    await cluster.fleet.die("decode-0")
    await cluster.actuator.tick()
    assert cluster.fleet.pools == {"standby-0": "decode", "prefill-1": "prefill"}
    assert len(await cluster.tick(4)) == 3


async def test_a_standby_that_still_loads_joins_too(cluster: Cluster) -> None:
    cluster.fleet.loading = {"standby-1"}
    await cluster.fleet.die("decode-0")
    await cluster.tick(3)
    assert sorted(cluster.fleet.pools) == ["prefill-0", "standby-0", "standby-1"]
    await cluster.fleet.die("standby-0")
    await cluster.actuator.tick()
    assert cluster.fleet.pools == {"prefill-0": "prefill", "standby-1": "decode"}, (
        "sooner than one that starts now"
    )


async def test_a_standby_that_dies_is_replaced_and_its_death_is_no_pools(cluster: Cluster) -> None:
    for number in range(3):
        await cluster.fleet.die(f"standby-{number}")
        await cluster.tick()
        cluster.clock.advance(60.0)
        await cluster.tick(2)
        assert f"standby-{number + 1}" in cluster.fleet.pools
        assert [one.worker_id for one in await cluster.registry.standbys()] == [
            f"standby-{number + 1}"
        ]
    await cluster.fleet.die("decode-0")
    await cluster.actuator.tick()
    assert cluster.fleet.pools["standby-3"] == "decode"


async def test_a_pool_that_keeps_dying_uses_standbys_up_no_faster_than_it_would_start_workers(
    cluster: Cluster,
) -> None:
    """Whatever kills its workers kills the standby that joins, too."""
    starts = []
    for _ in range(5):
        (victim,) = [one for one, pool in cluster.fleet.pools.items() if pool == "decode"]
        await cluster.fleet.die(victim)
        waited = 0.0
        while len(await cluster.tick()) < 3:
            cluster.clock.advance(0.5)
            waited += 0.5
        starts.append(waited)
    assert starts == sorted(starts)
    assert starts[-1] >= 4.0


async def test_a_pool_that_grows_takes_the_standby_first(cluster: Cluster) -> None:
    await cluster.registry.set_desired({"decode": 3})
    await cluster.actuator.tick()
    assert cluster.fleet.pools == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "standby-0": "decode",
        "decode-1": "decode",
    }
    assert await cluster.tick(4) == ["decode-0", "decode-1", "prefill-0", "standby-0", "standby-1"]


async def test_a_standby_joins_in_place_of_a_worker_without_room(cluster: Cluster) -> None:
    await cluster.fleet.die("decode-0")
    await cluster.fleet.die("standby-0")
    cluster.fleet.without_room = {"decode-1"}
    await cluster.actuator.tick()
    assert cluster.running == ["decode-1", "prefill-0"]
    await cluster.actuator._workers.start("standby")  # as one that had joined while there was room
    await cluster.tick(3, but=("decode-1",))
    assert cluster.fleet.pools.items() >= {"prefill-0": "prefill", "standby-1": "decode"}.items()
    assert cluster.fleet.stopped == ["decode-1"], "it waits for room no more"


async def test_an_operator_drains_a_standby(cluster: Cluster) -> None:
    await cluster.registry.request_drain("standby-0")
    await cluster.tick(3)
    assert cluster.fleet.stopped == ["standby-0"]
    assert cluster.running == ["decode-0", "prefill-0", "standby-1"]
    assert await cluster.registry.drains() == frozenset()
    assert [one.worker_id for one in await cluster.registry.standbys()] == ["standby-1"]


async def test_a_silent_standby_is_replaced(cluster: Cluster) -> None:
    await cluster.registry.remove_standby("standby-0")
    for _ in range(round(SILENT_S / INTERVAL_S) - 1):
        await cluster.actuator.tick()
    assert "standby-0" in cluster.running
    await cluster.actuator.tick()
    await cluster.actuator.tick()
    assert cluster.running == ["decode-0", "prefill-0", "standby-1"]


async def test_a_standby_that_never_becomes_ready_is_replaced(registry: Registry) -> None:
    async with running_cluster(
        registry, {"decode": 1}, standby=1, interval_s=START_S / 3
    ) as cluster:
        cluster.fleet.loading = {"standby-0"}
        assert await cluster.tick(4) == ["decode-0", "standby-0"], "its start limit is not over"
        assert await cluster.tick(2) == ["decode-0", "standby-1"]
        assert cluster.fleet.stopped == ["standby-0"]


async def test_a_standby_that_joins_while_it_loads_keeps_the_time_limit_of_its_start(
    registry: Registry,
) -> None:
    async with running_cluster(
        registry, {"decode": 1}, standby=1, interval_s=START_S / 3
    ) as cluster:
        cluster.fleet.loading = {"standby-0"}
        await cluster.tick(3)
        await cluster.fleet.die("decode-0")
        await cluster.actuator.tick()
        assert cluster.fleet.turned == ["standby-0"]
        await cluster.tick(1, but=("standby-0",))
        assert cluster.fleet.stopped == ["standby-0"]
        assert (await cluster.tick(2))[0] == "decode-1"


async def test_a_rolling_restart_renews_standbys_first_and_then_goes_by_way_of_them(
    cluster: Cluster,
) -> None:
    await cluster.registry.request_restart(["decode-0", "prefill-0", "standby-0"])
    running = await cluster.tick(20)
    assert len(running) == 3
    assert not {"decode-0", "prefill-0", "standby-0"} & set(running)
    assert cluster.fleet.stopped[0] == "standby-0", "no successor has to be restarted again"
    assert cluster.fleet.turned == ["standby-1", "standby-2"], "each successor was there at once"
    assert await cluster.registry.restarts() == frozenset()


async def test_all_end_with_the_actuator(cluster: Cluster) -> None:
    await cluster.actuator.leave()
    assert cluster.running == []


async def test_a_death_starts_a_poll_before_the_next_one_is_due(registry: Registry) -> None:
    looked, died, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def until_it_died() -> None:
        looked.set()
        await died.wait()
        died.clear()
        ended.set()

    async with running_cluster(registry, {"decode": 1}, standby=1, interval_s=3600.0) as cluster:
        await cluster.tick(3)
        await cluster.actuator.tick()
        cluster.fleet.ended = until_it_died  # type: ignore[method-assign]
        running = asyncio.create_task(cluster.actuator.run())
        await looked.wait()
        await cluster.fleet.die("decode-0")
        died.set()
        async with asyncio.timeout(60):
            while cluster.fleet.turned != ["standby-0"]:
                await asyncio.sleep(0.01)
        assert ended.is_set()
        running.cancel()


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)), st.integers(0, 5))
def test_ready_standbys_join_first_then_the_oldest(
    numbers: set[int], ready: set[int], count: int
) -> None:
    names = {f"standby-{number}" for number in numbers}
    loaded = {f"standby-{number}" for number in ready}
    chosen = standbys_to_join(names, loaded, count)
    assert len(chosen) == min(count, len(names)) == len(set(chosen))
    left = names - set(chosen)
    assert not (left & loaded and set(chosen) - loaded), (
        "no loading one goes while a loaded one is left"
    )
    for group in (loaded, names - loaded):
        ages = [int(name.rpartition("-")[2]) for name in chosen if name in group]
        rest = [int(name.rpartition("-")[2]) for name in left & group]
        assert ages == sorted(ages)
        assert not ages or not rest or max(ages) < min(rest)
