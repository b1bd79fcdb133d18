"""Workers that change their role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.actuator_fleet import Cluster, running_cluster

from kvrelay.state.registry import Registry
from kvrelay.types.workers import PoolName, WorkerState


@pytest.fixture
async def balanced(registry: Registry) -> AsyncIterator[Cluster]:
    """2 prefill workers and 1 decode worker that may change over."""
    async with running_cluster(registry, {"prefill": 2, "decode": 1}, rebalance=True) as made:
        yield made


async def pools(cluster: Cluster) -> dict[str, tuple[PoolName, WorkerState, int]]:
    return {
        one.worker_id: (one.pool, one.state, one.epoch) for one in await cluster.registry.workers()
    }


async def asked_to_change_over(cluster: Cluster) -> None:
    """One of its prefill workers, prefill-1, which is the emptier of two that both have work."""
    await cluster.tick()
    cluster.fleet.workers["prefill-0"].holds(running=2)
    cluster.fleet.workers["prefill-1"].holds(running=1)
    await cluster.fleet.beat()
    await cluster.registry.set_desired({"prefill": 1, "decode": 2})


async def test_a_worker_changes_over_once_it_is_empty(balanced: Cluster) -> None:
    await asked_to_change_over(balanced)
    assert await balanced.tick(5) == ["decode-0", "prefill-0", "prefill-1"], (
        "nothing is started, nothing stopped"
    )
    old = (await pools(balanced))["prefill-1"]
    assert old[:2] == ("prefill", "draining")
    balanced.fleet.workers["prefill-1"].holds()
    await balanced.tick(3)
    assert balanced.fleet.turned == ["prefill-1"]
    pool, state, epoch = (await pools(balanced))["prefill-1"]
    assert (pool, state) == ("decode", "ready")
    assert epoch > old[2]
    await balanced.tick(3)
    assert (balanced.running, balanced.fleet.stopped) == (
        ["decode-0", "prefill-0", "prefill-1"],
        [],
    )
    assert balanced.fleet.workers["prefill-1"].drain_calls == 0, "the new incarnation stays"


async def test_the_last_roles_entry_says_nothing_of_the_new_one(balanced: Cluster) -> None:
    await balanced.tick()
    await balanced.registry.set_desired({"prefill": 1, "decode": 2})
    await balanced.tick()
    (old,) = [one for one in await balanced.registry.workers() if one.worker_id == "prefill-1"]
    await balanced.actuator.tick()
    assert balanced.fleet.turned == ["prefill-1"]
    await balanced.registry.publish_worker(old, ttl_s=600)  # its last heartbeat was on the way
    await balanced.actuator.tick()
    await balanced.tick(3)
    assert (await pools(balanced))["prefill-1"][:2] == ("decode", "ready")
    assert balanced.fleet.workers["prefill-1"].drain_calls == 0


async def test_a_start_without_room_is_cancelled_for_a_worker_that_is_there(
    balanced: Cluster,
) -> None:
    await balanced.tick()
    await balanced.registry.set_desired({"decode": 2})
    await balanced.actuator.tick()
    balanced.fleet.without_room = {"decode-1"}
    await balanced.registry.set_desired({"prefill": 1})
    await balanced.actuator.tick()
    assert balanced.fleet.stopped == ["decode-1"]
    balanced.fleet.without_room.clear()
    await balanced.tick(3)
    assert (balanced.running, balanced.fleet.turned) == (
        ["decode-0", "prefill-0", "prefill-1"],
        ["prefill-1"],
    )


async def test_who_is_told_to_end_does_not_change_over(balanced: Cluster) -> None:
    await asked_to_change_over(balanced)
    await balanced.tick(2)
    await balanced.registry.request_drain("prefill-1")
    await balanced.tick(2)
    balanced.fleet.workers["prefill-1"].holds()
    await balanced.tick(3)
    assert balanced.fleet.turned == []
    assert "prefill-1" in balanced.fleet.stopped
    assert balanced.running == ["decode-0", "decode-1", "prefill-0"]


async def test_one_that_is_no_longer_wanted_there_comes_back(balanced: Cluster) -> None:
    await asked_to_change_over(balanced)
    await balanced.tick(2)
    balanced.fleet.workers["decode-0"].holds(running=5)
    await balanced.fleet.beat()
    await balanced.registry.set_desired({"prefill": 2, "decode": 1})
    await balanced.actuator.tick()
    balanced.fleet.workers["prefill-1"].holds()
    await balanced.tick(4)
    found = await pools(balanced)
    assert {name: one[0] for name, one in found.items()} == {
        "decode-0": "decode",
        "prefill-0": "prefill",
        "prefill-1": "prefill",
    }
    assert balanced.fleet.stopped == []
