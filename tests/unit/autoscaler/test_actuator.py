from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.actuator_fleet import Cluster, Fleet, running_cluster

from autoscaler.actuator import Actuator
from autoscaler.managed_workers import SETTLED_S
from autoscaler.rebalancing import surplus
from autoscaler.worker_drain import LATE_S, VERSION_DRAIN_S
from autoscaler.worker_watch import SILENT_S, START_S
from kvrelay.clock import ManualClock
from kvrelay.errors import Unavailable
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import EndedWorker, PendingWorker, WorkerInfo, WorkerLoad


@pytest.fixture
async def cluster(registry: Registry) -> AsyncIterator[Cluster]:
    async with running_cluster(registry, {"prefill": 1, "decode": 2}) as made:
        yield made


INTERVAL_S = 0.5  # the actuator's own
FIRST = ["decode-0", "decode-1", "prefill-0"]


async def test_starts_what_is_missing_and_counts_what_is_starting(cluster: Cluster) -> None:
    await cluster.actuator.tick()
    await cluster.actuator.tick()
    assert cluster.running == FIRST
    assert await cluster.registry.desired() == {"prefill": 1, "decode": 2}


async def test_sizes_in_the_registry_win_over_the_initial_ones_and_are_restored_when_lost(
    cluster: Cluster,
) -> None:
    await cluster.registry.set_desired({"decode": 3})
    assert await cluster.tick() == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    await cluster.registry._call("FLUSHALL")
    await cluster.fleet.beat()
    assert await cluster.tick() == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert await cluster.registry.desired() == {"prefill": 1, "decode": 3}


async def test_the_emptiest_is_drained_and_stopped_only_when_it_is_empty(cluster: Cluster) -> None:
    await cluster.tick()
    busy, calmer = cluster.fleet.workers["decode-0"], cluster.fleet.workers["decode-1"]
    busy.holds(running=3)
    calmer.holds(running=1, leases=1)
    await cluster.fleet.beat()
    await cluster.registry.set_desired({"decode": 1})
    assert await cluster.tick(5) == FIRST
    assert (busy.drain_calls, calmer.drain_calls) == (0, 1)
    calmer.holds(leases=1)
    assert await cluster.tick(2) == FIRST, "a lease is a promise"
    calmer.holds()
    assert await cluster.tick(2) == ["decode-0", "prefill-0"]
    assert cluster.fleet.stopped == ["decode-1"]
    assert [info.worker_id for info in await cluster.registry.workers()] == [
        "decode-0",
        "prefill-0",
    ]


async def test_empty_is_not_enough_before_the_worker_says_that_it_drains(cluster: Cluster) -> None:
    await cluster.tick()
    cluster.fleet.workers["decode-0"].holds(running=1)
    refusing = cluster.fleet.workers["decode-1"]
    refusing.refuses_drain = True
    await cluster.fleet.beat()
    await cluster.registry.set_desired({"decode": 1})
    assert await cluster.tick(3) == FIRST, "it may be given work at any moment"
    assert refusing.drain_calls == 3, "asked again each time"
    refusing.refuses_drain = False
    assert await cluster.tick(2) == ["decode-0", "prefill-0"]


async def test_a_worker_hands_back_by_itself_and_is_not_waited_for_without_end(
    cluster: Cluster,
) -> None:
    await cluster.tick()
    for name in ("decode-0", "decode-1"):
        cluster.fleet.workers[name].holds(running=1)
    await cluster.fleet.beat()
    await cluster.registry.set_desired({"decode": 1})
    await cluster.tick()
    assert cluster.fleet.workers["decode-1"].grace_s == DRAIN_GRACE_S
    cluster.clock.advance(DRAIN_GRACE_S + LATE_S - 0.1)
    assert await cluster.tick() == FIRST, "it is stopped when it is empty, not before"
    cluster.clock.advance(0.1)
    with capture_logs() as logs:
        assert await cluster.tick() == ["decode-0", "prefill-0"]
    assert "worker_drain_timeout" in [line["event"] for line in logs]


async def test_a_start_that_is_no_longer_wanted_is_cancelled(cluster: Cluster) -> None:
    await cluster.tick()
    await cluster.registry.set_desired({"decode": 4})
    await cluster.actuator.tick()  # decode-2 and decode-3 do not serve yet
    await cluster.registry.set_desired({"decode": 3})
    await cluster.actuator.tick()
    assert cluster.fleet.stopped == ["decode-3"]
    assert cluster.running == ["decode-0", "decode-1", "decode-2", "prefill-0"]


async def test_the_dead_are_replaced_under_a_new_name(cluster: Cluster) -> None:
    await cluster.tick()
    await cluster.fleet.die("decode-0")
    assert await cluster.tick() == ["decode-1", "decode-2", "prefill-0"]
    names = [info.worker_id for info in await cluster.registry.workers()]
    assert names == ["decode-1", "decode-2", "prefill-0"], (
        "routers need not wait for the entry to expire"
    )


async def test_a_pool_whose_workers_keep_dying_waits_longer_each_time(cluster: Cluster) -> None:
    await cluster.tick()
    waits = []
    for number in (0, 2, 3, 4):
        await cluster.fleet.die(f"decode-{number}")
        waited = 0.0
        while len(await cluster.tick()) < 3:
            cluster.clock.advance(0.5)
            waited += 0.5
        waits.append(waited)
    assert waits == [0, 1, 2, 4]
    assert cluster.running == ["decode-1", "decode-5", "prefill-0"], (
        "and nothing is started twice meanwhile"
    )


async def test_a_worker_that_has_served_for_a_while_is_replaced_at_once_however_many_died(
    cluster: Cluster,
) -> None:
    await cluster.tick()
    for number in (0, 2, 3):
        await cluster.tick(2 + round(SETTLED_S / INTERVAL_S))
        await cluster.fleet.die(f"decode-{number}")
        assert len(await cluster.tick()) == 3
    await cluster.fleet.die("decode-4")
    assert len(await cluster.tick()) == 3, "the first that died young is made good at once, too"
    await cluster.fleet.die("decode-5")
    assert len(await cluster.tick()) == 2, "the second is waited for"


async def test_a_death_while_draining_is_no_reason_to_wait(cluster: Cluster) -> None:
    await cluster.tick()
    for number in (0, 1):
        cluster.fleet.workers[f"decode-{number}"].holds(running=1)
        await cluster.registry.request_drain(f"decode-{number}")
    await cluster.fleet.beat()
    await cluster.tick()
    await cluster.fleet.die("decode-0")
    await cluster.fleet.die("decode-1")
    await cluster.tick()
    await cluster.fleet.die("decode-2")
    assert await cluster.tick() == ["decode-3", "decode-4", "prefill-0"], (
        "that was the first unexpected one"
    )


async def test_why_workers_ended_is_told_for_a_while(cluster: Cluster) -> None:
    await cluster.tick(2)
    cluster.fleet.causes["prefill-0"] = "its host ran out of memory"
    await cluster.fleet.die("prefill-0")
    await cluster.registry.set_desired({"decode": 1})
    await cluster.tick(4)
    assert await cluster.registry.ended() == (
        EndedWorker("decode-1", "the pool is wanted at 1", drained=True),
        EndedWorker("prefill-0", "its host ran out of memory", drained=False),
    )
    await cluster.registry._call("DEL", "kvrelay:ended:decode-1", "kvrelay:ended:prefill-0")
    cluster.fleet.workers["decode-0"].info = dataclasses.replace(
        cluster.fleet.workers["decode-0"].info, state="stuck"
    )
    await cluster.fleet.beat()
    await cluster.tick()
    assert await cluster.registry.ended() == (
        EndedWorker("decode-0", "a step took too long", drained=False),
    )


async def test_a_launcher_without_room_is_asked_again_with_backoff(cluster: Cluster) -> None:
    cluster.fleet.broken = True
    with capture_logs() as logs:
        await cluster.tick(3)
    assert [line["worker"] for line in logs if line["event"] == "worker_start_failed"] == [
        "prefill-0",
        "decode-0",
        "decode-1",
        "prefill-1",
    ]
    cluster.fleet.broken = False
    cluster.clock.advance(60.0)
    assert len(await cluster.tick()) == 3


async def test_an_operators_drain_is_followed_and_the_worker_replaced(cluster: Cluster) -> None:
    await cluster.tick()
    cluster.fleet.workers["decode-1"].holds(running=1)
    await cluster.fleet.beat()
    await cluster.registry.request_drain("decode-1")
    assert await cluster.tick(2) == ["decode-0", "decode-1", "decode-2", "prefill-0"], (
        "the successor comes first"
    )
    cluster.fleet.workers["decode-1"].holds()
    assert await cluster.tick(2) == ["decode-0", "decode-2", "prefill-0"]
    assert await cluster.registry.drains() == frozenset()


async def test_a_drain_of_nobody_is_cleared(cluster: Cluster) -> None:
    await cluster.tick()
    await cluster.registry.request_drain("decode-77")
    await cluster.tick()
    assert await cluster.registry.drains() == frozenset()


async def test_a_worker_that_falls_silent_is_replaced(cluster: Cluster) -> None:
    await cluster.tick(2)
    await cluster.registry._call("DEL", "kvrelay:worker:decode-0")
    looks = round(SILENT_S / 0.5)
    for _ in range(looks - 1):
        await cluster.actuator.tick()
    await cluster.fleet.beat()
    await cluster.actuator.tick()
    await cluster.registry._call("DEL", "kvrelay:worker:decode-0")
    for _ in range(looks - 1):
        await cluster.actuator.tick()
    assert cluster.running == FIRST, "a heartbeat in between starts the count anew"
    await cluster.actuator.tick()
    assert cluster.running == ["decode-1", "decode-2", "prefill-0"]


async def test_nobody_is_silent_where_redis_takes_no_writes(cluster: Cluster) -> None:
    await cluster.tick(2)
    await cluster.registry._call("DEL", "kvrelay:worker:decode-0")
    await cluster.registry._call("REPLICAOF", "127.0.0.1", "1")
    for _ in range(round(SILENT_S / INTERVAL_S) + 1):
        with pytest.raises(Unavailable, match="read only replica"):
            await cluster.actuator.tick()
    assert cluster.running == FIRST
    await cluster.registry._call("REPLICAOF", "NO", "ONE")
    assert await cluster.tick() == FIRST


async def test_a_start_that_hangs_is_given_up(registry: Registry) -> None:
    fleet = Fleet(registry)
    actuator = Actuator(registry, fleet, {"decode": 1}, clock=ManualClock(), interval_s=START_S / 2)
    await actuator.tick()
    assert sorted(fleet.pools) == ["decode-0"]
    await actuator.tick()
    await actuator.tick()
    assert sorted(fleet.pools) == ["decode-1"]


async def test_a_worker_that_no_node_has_room_for_is_waited_for_and_shown(
    registry: Registry,
) -> None:
    fleet = Fleet(registry, without_room={"decode-0"})
    actuator = Actuator(registry, fleet, {"decode": 1}, clock=ManualClock(), interval_s=START_S / 2)
    await actuator.tick()
    for _ in range(5):
        await actuator.tick()
        assert await registry.pending() == (
            PendingWorker("decode-0", "decode", "no Ray node has room for CPU 1"),
        )
    assert sorted(fleet.pools) == ["decode-0"], "a start in vain would have been given up"
    fleet.without_room.clear()
    await fleet.beat()
    await actuator.tick()
    assert actuator._workers.by_id["decode-0"].serving
    await fleet.die("decode-0")


async def test_a_size_beyond_all_room_can_be_taken_back(registry: Registry) -> None:
    """The controller asks for some workers at a time, and reads the wanted size in between."""
    names = {f"decode-{number}" for number in range(1, 1000)}
    fleet = Fleet(registry, without_room=names)
    actuator = Actuator(registry, fleet, {"decode": 1000}, clock=ManualClock())
    await actuator.tick()
    await actuator.tick()
    assert len(fleet.pools) < 100
    assert len(await registry.pending()) > 1, "operators see them meanwhile"
    await registry.set_desired({"decode": 1})
    await actuator.tick()
    assert sorted(fleet.pools) == ["decode-0"]
    await actuator.tick()
    assert await registry.pending() == ()
    await fleet.die("decode-0")


async def test_a_worker_that_is_seen_but_never_ready_is_given_up(registry: Registry) -> None:
    fleet = Fleet(registry, first_state="starting")
    actuator = Actuator(registry, fleet, {"decode": 1}, clock=ManualClock(), interval_s=START_S / 2)
    for _ in range(2):
        await actuator.tick()
        await fleet.beat()
    assert sorted(fleet.pools) == ["decode-0"]
    await actuator.tick()
    assert sorted(fleet.pools) == ["decode-1"]
    await fleet.die("decode-1")


async def test_a_stuck_worker_is_replaced_at_once(cluster: Cluster) -> None:
    await cluster.tick(2)
    cluster.fleet.workers["decode-0"].is_now("stuck")
    await cluster.fleet.beat()
    assert await cluster.tick() == ["decode-1", "decode-2", "prefill-0"]


async def test_who_is_told_to_end_by_others_has_its_successor_while_it_drains(
    cluster: Cluster,
) -> None:
    await cluster.tick(2)
    worker = cluster.fleet.workers["decode-0"]
    worker.is_now("draining")
    worker.holds(running=1)
    await cluster.fleet.beat()
    assert await cluster.tick(2) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert worker.drain_calls == 0
    await cluster.fleet.die("decode-0")
    await cluster.fleet.die("decode-1")
    assert await cluster.tick() == ["decode-2", "decode-3", "prefill-0"], (
        "only one death was unexpected"
    )


async def test_names_are_not_given_twice_by_two_controllers(registry: Registry) -> None:
    first, second = Fleet(registry), Fleet(registry)
    await Actuator(registry, first, {"decode": 2}, clock=ManualClock()).tick()
    await registry.set_desired({"decode": 3})
    later = Actuator(registry, second, {"decode": 2}, clock=ManualClock())
    await later.tick()
    assert sorted(second.pools) == ["decode-2", "decode-3", "decode-4"]
    await registry._call("FLUSHALL")
    await second.die("decode-3")
    await later.tick()
    assert sorted(second.pools) == ["decode-2", "decode-4", "decode-5"], "Redis may forget"


async def restarting(cluster: Cluster, *worker_ids: str) -> None:
    await cluster.tick(2)
    for worker_id in worker_ids:
        cluster.fleet.workers[worker_id].holds(running=1)
    await cluster.fleet.beat()
    await cluster.registry.request_restart(worker_ids)


async def test_a_restart_goes_worker_by_worker_and_the_successor_comes_first(
    cluster: Cluster,
) -> None:
    await restarting(cluster, "decode-0", "decode-1", "prefill-0")
    old = dict(cluster.fleet.workers)
    cluster.fleet.first_state = "starting"
    both = [*FIRST, "decode-2", "prefill-1"]
    assert await cluster.tick(5) == sorted(both), "one successor for each pool"
    assert [worker.drain_calls for worker in old.values()] == [0, 0, 0], "which are not ready yet"
    for name in ("decode-2", "prefill-1"):
        cluster.fleet.workers[name].is_now("ready")
    await cluster.fleet.beat()
    assert await cluster.tick(5) == sorted(both)
    assert {name: worker.drain_calls for name, worker in old.items()} == {
        "decode-0": 1,
        "decode-1": 0,
        "prefill-0": 1,
    }
    cluster.fleet.first_state = "ready"
    for worker in old.values():
        worker.holds()
    await cluster.fleet.beat()
    assert await cluster.tick(8) == ["decode-2", "decode-3", "prefill-1"]
    assert cluster.fleet.stopped.index("decode-0") < cluster.fleet.stopped.index("decode-1")
    assert await cluster.registry.restarts() == frozenset()
    assert await cluster.registry.desired() == {"prefill": 1, "decode": 2}


async def test_a_worker_that_dies_before_its_turn_is_restarted(cluster: Cluster) -> None:
    await restarting(cluster, "decode-0", "decode-1")
    await cluster.fleet.die("decode-1")
    cluster.fleet.workers["decode-0"].holds()
    await cluster.fleet.beat()
    assert await cluster.tick(8) == ["decode-2", "decode-3", "prefill-0"]
    assert await cluster.registry.restarts() == frozenset()


async def test_a_restart_outlives_its_controller(cluster: Cluster) -> None:
    """Its workers end with it, and the next one finds nothing left to restart."""
    await restarting(cluster, "decode-0", "decode-1")
    for worker_id in list(cluster.fleet.pools):
        await cluster.fleet.die(worker_id)
    await cluster.registry._call("DEL", *(f"kvrelay:worker:{name}" for name in FIRST))
    fleet = Fleet(cluster.registry)
    later = Actuator(cluster.registry, fleet, {"prefill": 1, "decode": 2}, clock=ManualClock())
    for _ in range(3):
        await later.tick()
        await fleet.beat()
    assert sorted(fleet.pools) == ["decode-2", "decode-3", "prefill-1"]
    assert await cluster.registry.restarts() == frozenset()
    for worker_id in list(fleet.pools):
        await fleet.die(worker_id)


async def test_leaving_drains_those_that_serve_and_stops_the_others(cluster: Cluster) -> None:
    await cluster.tick(2)
    await cluster.registry.set_desired({"decode": 3})
    await cluster.actuator.tick()
    await cluster.actuator.leave()
    assert sorted(cluster.fleet.drained) == FIRST
    assert cluster.fleet.stopped == ["decode-2"]


async def test_leaving_waits_for_all_workers_when_the_drain_of_one_fails(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = cluster.fleet.drain

    async def fail_or_wait(worker_id: str) -> None:
        if worker_id == FIRST[0]:
            raise Unavailable("the drain was not answered")
        await asyncio.sleep(0.01)
        await drain(worker_id)

    await cluster.tick(2)
    monkeypatch.setattr(cluster.fleet, "drain", fail_or_wait)
    with pytest.raises(Unavailable, match="not answered"):
        await cluster.actuator.leave()
    assert sorted(cluster.fleet.drained) == FIRST[1:]


async def test_workers_outlive_redis() -> None:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as registry:
        fleet = Fleet(registry)
        clock = ManualClock()
        actuator = Actuator(registry, fleet, {"decode": 2}, clock=clock)
        await actuator.tick()
        await fleet.beat()
        os.kill(server.pid, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        running = asyncio.create_task(actuator.run())
        async with asyncio.timeout(60):
            while True:
                clock.advance(600.0)
                try:
                    if await registry.desired() == {"decode": 2}:
                        break
                except Unavailable:
                    pass
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sorted(fleet.pools) == ["decode-0", "decode-1"], (
            "nothing stopped, nothing started twice"
        )
        assert fleet.stopped == []
        for worker_id in list(fleet.pools):
            await fleet.die(worker_id)


names = st.lists(st.integers(0, 50).map(lambda number: f"decode-{number}"), unique=True, max_size=8)


@given(names, st.data())
def test_surplus_takes_the_emptiest(staying: list[str], data: st.DataObject) -> None:
    serving = data.draw(st.sets(st.sampled_from(staying)) if staying else st.just(set()))
    held = {name: data.draw(st.integers(0, 3)) for name in serving}
    infos = {
        name: WorkerInfo(
            name,
            "decode",
            1,
            "ready",
            "127.0.0.1:1",
            "demo",
            "00",
            16,
            64,
            "host",
            4096,
            WorkerLoad(running=count),
        )
        for name, count in held.items()
    }
    count = data.draw(st.integers(-2, 9))
    taken = surplus(staying, serving, infos, count)
    assert len(taken) == len(set(taken)) == min(max(count, 0), len(staying))
    left = set(staying) - set(taken)
    for one in taken:
        for other in left:
            assert (one in serving, held.get(one, 0)) <= (other in serving, held.get(other, 0))


async def test_without_rebalance_one_stops_and_another_starts(cluster: Cluster) -> None:
    await cluster.tick()
    await cluster.registry.set_desired({"prefill": 2, "decode": 1})
    await cluster.tick(4)
    assert (cluster.running, cluster.fleet.turned) == (["decode-0", "prefill-0", "prefill-1"], [])


@pytest.mark.parametrize("another", [True, False])
async def test_the_last_decode_worker_of_a_version_has_the_time_of_an_answer(
    cluster: Cluster, another: bool
) -> None:
    await restarting(cluster, "decode-0", "decode-1", "prefill-0")
    old = dict(cluster.fleet.workers)
    for worker in old.values():
        worker.holds()
    for _ in range(8):
        await cluster.tick()
        for name, worker in cluster.fleet.workers.items():
            if name not in old and another:
                worker.info = dataclasses.replace(worker.info, model_id="successor")
        await cluster.fleet.beat()
    assert sorted(cluster.fleet.workers) == ["decode-2", "decode-3", "prefill-1"]
    graces = {name: worker.grace_s for name, worker in old.items()}
    last = VERSION_DRAIN_S if another else DRAIN_GRACE_S
    assert graces == {"decode-0": DRAIN_GRACE_S, "decode-1": last, "prefill-0": DRAIN_GRACE_S}
