"""The operator's endpoint, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from support.router_harness import RouterHarness, running_router

from kvrelay.types.control_plane import ScalingDecision
from kvrelay.types.workers import PendingWorker
from kvrelay.wire.cluster import ClusterServiceStub, cluster_status_from_proto, pb


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    async with running_router() as running:
        yield running


@pytest.fixture
async def admin(router: RouterHarness) -> AsyncIterator[ClusterServiceStub]:
    async with grpc.aio.insecure_channel(router.admin) as channel:
        yield ClusterServiceStub(channel)


async def test_status(router: RouterHarness, admin: ClusterServiceStub) -> None:
    decision = ScalingDecision(12.0, "decode", 1, 2, "queue_depth is 8")
    router.registry.history = (decision,)
    router.registry.sizes = {"decode": 2}
    status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
    assert (status.model, status.state, status.registry) == ("demo", "ready", "ok")
    assert (status.block_size, status.block_bytes) == (32, 64)
    assert [
        (pool.name, pool.desired, [one.worker_id for one in pool.workers]) for pool in status.pools
    ] == [
        ("prefill", 1, ["prefill-0"]),
        ("decode", 2, ["decode-0"]),
    ]
    assert status.decisions == (decision,)
    assert status.router.router_id.startswith("router-")
    assert status.router.rss_bytes > 0


async def test_status_while_the_registry_is_away(
    router: RouterHarness, admin: ClusterServiceStub
) -> None:
    router.registry.away = True
    status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
    assert status.registry == "Redis at memory: away"
    assert [len(pool.workers) for pool in status.pools] == [1, 1]


async def test_watch(admin: ClusterServiceStub) -> None:
    call = admin.WatchStatus(pb.WatchStatusRequest(interval_seconds=0.1))
    states = [cluster_status_from_proto(await call.read()).state for _ in range(2)]
    call.cancel()
    assert states == ["ready", "ready"]


@pytest.mark.parametrize("interval", [-1.0, 0.01, float("nan"), float("inf")])
async def test_watch_at_no_interval(admin: ClusterServiceStub, interval: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.WatchStatus(pb.WatchStatusRequest(interval_seconds=interval)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_set_pool_size(router: RouterHarness, admin: ClusterServiceStub) -> None:
    response = await admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=3))
    assert (response.prefill, response.decode) == (3, 1)
    assert router.registry.sizes == {"prefill": 3}
    response = await admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=0, decode=2))
    assert (response.prefill, response.decode) == (0, 2)


async def test_an_operators_change_is_in_the_scaling_history(
    router: RouterHarness, admin: ClusterServiceStub
) -> None:
    await admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=3, reason="the launch at noon"))
    # The size of prefill does not change.
    await admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=3, decode=2))
    status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
    assert [(one.pool, one.before, one.after, one.reason) for one in status.decisions] == [
        ("decode", 1, 2, "set by an operator"),
        ("prefill", 1, 3, "set by an operator: the launch at noon"),
    ]


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines", "\x1b[31mred"])
async def test_a_reason_that_no_history_holds(
    router: RouterHarness, admin: ClusterServiceStub, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=3, reason=reason))
    assert dict(caught.value.trailing_metadata())["kvrelay-field"] == "reason"
    assert router.registry.sizes == {}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.SetPoolSizeRequest(prefill=-1), "prefill"),
        (pb.SetPoolSizeRequest(decode=0), "decode"),
        (pb.SetPoolSizeRequest(prefill=2, decode=100_000), "decode"),
    ],
)
async def test_impossible_pool_sizes(
    router: RouterHarness, admin: ClusterServiceStub, request_: pb.SetPoolSizeRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.SetPoolSize(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["kvrelay-field"] == field
    assert router.registry.sizes == {}


async def test_drain_worker(router: RouterHarness, admin: ClusterServiceStub) -> None:
    await admin.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-0"))
    assert router.registry.drains == ["decode-0"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-9"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "decode-0" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([], ["decode-0", "prefill-0"]),
        (["decode"], ["decode-0"]),
        (["prefill", "prefill-0"], ["prefill-0"]),
        (["decode-0"], ["decode-0"]),
    ],
)
async def test_restart_workers(
    router: RouterHarness, admin: ClusterServiceStub, names: list[str], chosen: list[str]
) -> None:
    response = await admin.RestartWorkers(pb.RestartWorkersRequest(names=names))
    assert list(response.worker_ids) == chosen
    assert router.registry.restarting == set(chosen)
    status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
    assert status.restarting == tuple(chosen)


async def test_workers_without_room_are_shown(
    router: RouterHarness, admin: ClusterServiceStub
) -> None:
    router.registry.without_room = (
        PendingWorker("decode-1", "decode", "no Ray node has room for CPU 1"),
    )
    status = cluster_status_from_proto(await admin.GetStatus(pb.GetStatusRequest()))
    assert status.pending == router.registry.without_room
    assert {pool.name: len(pool.workers) for pool in status.pools} == {"prefill": 1, "decode": 1}


async def test_a_restart_of_nobody_restarts_nobody(
    router: RouterHarness, admin: ClusterServiceStub
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.RestartWorkers(pb.RestartWorkersRequest(names=["decode", "decode-9"]))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "prefill, decode, standby name all of a pool" in str(caught.value.details())
    assert router.registry.restarting == set()


async def test_nothing_is_changed_without_a_registry(
    router: RouterHarness, admin: ClusterServiceStub
) -> None:
    router.registry.away = True
    for call in (
        admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=2)),
        admin.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-0")),
        admin.RestartWorkers(pb.RestartWorkersRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
