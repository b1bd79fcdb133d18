"""A router looks at the registry when something changes there, and shows what stands by."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support.cluster_status import first_status
from support.router_harness import running_router

import router.runtime.driver
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import StandbyWorker
from kvrelay.wire.cluster import ClusterServiceStub, ClusterStatus, cluster_status_from_proto, pb

pytestmark = pytest.mark.timeout(120)
STANDBY = StandbyWorker("standby-0", "ready", "host", 7, 11, 13)


async def test_a_worker_is_found_without_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.runtime.driver, "POLL_S", 3600.0)
    async with running_router() as harness, grpc.aio.insecure_channel(harness.admin) as channel:
        admin = ClusterServiceStub(channel)

        async def status() -> ClusterStatus:
            return cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))

        await first_status(
            status, lambda now: len(now.pools[1].workers) == 1, "the router has polled once", 60
        )
        await harness.add("decode-7", "decode")
        harness.registry.announced.set()
        found = await first_status(
            status, lambda now: len(now.pools[1].workers) == 2, "the new worker is found", 60
        )
        assert [one.worker_id for one in found.pools[1].workers] == ["decode-0", "decode-7"]


async def test_standby_workers_are_shown_until_they_serve_and_can_be_drained_and_restarted() -> (
    None
):
    async with running_router() as harness, grpc.aio.insecure_channel(harness.admin) as channel:
        admin = ClusterServiceStub(channel)
        harness.registry.standing_by = (STANDBY,)
        status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
        assert status.standby == (STANDBY,)
        assert [len(pool.workers) for pool in status.pools] == [1, 1]
        await admin.DrainWorker(pb.DrainWorkerRequest(worker_id="standby-0"))
        assert harness.registry.drains == ["standby-0"]
        restarted = await admin.RestartWorkers(pb.RestartWorkersRequest(names=["standby"]))
        assert list(restarted.worker_ids) == ["standby-0"]
        restarted = await admin.RestartWorkers(pb.RestartWorkersRequest())
        assert list(restarted.worker_ids) == ["decode-0", "prefill-0", "standby-0"]
        harness.registry.standing_by = (StandbyWorker("decode-0", "ready", "host", 7, 11, 13),)
        status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
        assert status.standby == (), "it has just joined, and its entry is not yet gone"


async def test_the_registry_tells_of_changes_and_listens_again_when_its_connection_is_lost() -> (
    None
):
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as registry:
        heard = asyncio.Event()

        async def listen() -> None:
            async for _ in registry.changes():
                heard.set()

        async def change_is_heard() -> None:
            while not heard.is_set():
                await registry.announce_change()
                await asyncio.sleep(0.01)
            heard.clear()

        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(listen())
            await change_is_heard()
            await registry._call("CLIENT", "KILL", "TYPE", "pubsub")
            await change_is_heard()
            listening.cancel()
