"""What the gRPC ports bear: large metadata, many connections, peers that say nothing or ping
without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.router_harness import RouterHarness, running_router

import router.api.listeners

CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture
async def cluster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RouterHarness]:
    """With the listeners' options changed as the test's parameter says."""
    options = dict(router.api.listeners._OPTIONS)
    changed = getattr(request, "param", {})
    assert changed.keys() <= options.keys()
    monkeypatch.setattr(router.api.listeners, "_OPTIONS", tuple((options | changed).items()))
    async with running_router(prefill=0) as running:
        yield running


async def check(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> grpc.StatusCode:
    call = health_pb2_grpc.HealthStub(channel).Check(CHECK, metadata=metadata, timeout=60)
    code: grpc.StatusCode = await call.code()
    return code


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        while await reader.read(1000):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_metadata_over_the_bound_is_refused(cluster: RouterHarness) -> None:
    for target in (cluster.grpc, cluster.admin):
        async with grpc.aio.insecure_channel(target) as channel:
            assert await check(channel, ("x-large", "x" * 15_000)) is grpc.StatusCode.OK
            assert (
                await check(channel, ("x-large", "x" * 17_000))
                is grpc.StatusCode.RESOURCE_EXHAUSTED
            )
            assert await check(channel) is grpc.StatusCode.OK


@pytest.mark.parametrize("cluster", [{"grpc.server_handshake_timeout_ms": 300}], indirect=True)
async def test_a_peer_that_says_nothing_is_left(cluster: RouterHarness) -> None:
    host, port = cluster.grpc.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        assert await ended(reader)
    writer.close()


@pytest.mark.parametrize("cluster", [{"grpc.max_allowed_incoming_connections": 3}], indirect=True)
async def test_connections_over_the_bound_are_ended_and_others_go_on(
    cluster: RouterHarness,
) -> None:
    host, port = cluster.grpc.split(":")
    options = (("grpc.use_local_subchannel_pool", 1),)  # a connection for each channel
    held = [grpc.aio.insecure_channel(cluster.grpc, options) for _ in range(3)]
    assert [await check(one) for one in held] == [grpc.StatusCode.OK] * 3
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        assert await ended(reader)
    writer.close()
    assert [await check(one) for one in held] == [grpc.StatusCode.OK] * 3
    for one in held:
        await one.close()


@pytest.mark.parametrize(
    "cluster", [{"grpc.http2.min_ping_interval_without_data_ms": 60_000}], indirect=True
)
async def test_a_peer_that_pings_without_end_is_shut_out(cluster: RouterHarness) -> None:
    options = (("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1))
    unbound = (("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(cluster.grpc, (*options, *unbound)) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(60):
                await watch.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping" in (caught.value.details() or "").lower()
