"""What the gRPC ports bear: large metadata, many connections, peers that say nothing or ping
without end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http2_peer import Http2Peer
from support.router_harness import RouterHarness, running_router

import router.api.grpc.listener
import router.api.grpc.receive_slots
from kvrelay.client import AsyncClient, channels
from kvrelay.errors import DeadlineExceeded, ResourceExhausted
from kvrelay.tenants import Tenant
from router.api.grpc.listener import MAX_MESSAGE_BYTES, RECEIVE_BYTES
from router.api.grpc.messages import MAX_PROBE_BYTES, MAX_STREAMED
from router.api.grpc.receive_slots import PROBES, SLOTS, ProbeSlots, ReceiveSlots

GENERATE = "/kvrelay.v1.InferenceService/Generate"
CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture
async def cluster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RouterHarness]:
    """With the listeners' options changed as the test's parameter says. One server has the port."""
    options = dict(router.api.grpc.listener._OPTIONS)
    changed = getattr(request, "param", {})
    assert changed.keys() <= options.keys()
    monkeypatch.setattr(router.api.grpc.listener, "_OPTIONS", tuple((options | changed).items()))
    monkeypatch.setattr(router.api.grpc.listener, "MAX_SERVERS", 1)
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


SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")


async def reflect(
    channel: grpc.aio.Channel, requests: list[reflection_pb2.ServerReflectionRequest]
) -> tuple[int, grpc.StatusCode]:
    """The number of answers to these requests, and the status of the call."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(requests))
    answers = 0
    try:
        async for _ in call:
            answers += 1
    except grpc.aio.AioRpcError as error:
        return answers, error.code()
    return answers, await call.code()


async def test_messages_of_reflection_are_bounded_in_size_and_number(
    cluster: RouterHarness,
) -> None:
    long = reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * MAX_PROBE_BYTES)
    for target in (cluster.grpc, cluster.admin):
        async with grpc.aio.insecure_channel(target) as channel:
            assert await reflect(channel, []) == (0, grpc.StatusCode.OK)
            assert await reflect(channel, [SERVICES] * 3) == (3, grpc.StatusCode.OK)
            assert await reflect(channel, [SERVICES, long, SERVICES]) == (
                1,
                grpc.StatusCode.INVALID_ARGUMENT,
            )
            assert await reflect(channel, [SERVICES] * (MAX_STREAMED + 9)) == (
                MAX_STREAMED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )


async def test_a_probe_is_answered_while_others_say_nothing(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine takes its time to read the probe.
    monkeypatch.setattr(router.api.grpc.receive_slots, "PROBE_S", 600.0)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        silent = [
            channel.stream_stream("/grpc.health.v1.Health/Check")() for _ in range(PROBES + 20)
        ]
        # The first ones may have given way, and raise, before the last one has begun.
        await silent[-1].wait_for_connection()
        assert await check(channel) is grpc.StatusCode.OK
        # Those that came first gave way to others and to the probe.
        codes = [one.code() for one in silent[:21]]
        async with asyncio.timeout(60):
            assert set(await asyncio.gather(*codes)) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        for call in silent:
            call.cancel()


async def test_a_tenant_leaves_slots_to_others() -> None:
    slots, begun = ReceiveSlots(), list[str]()

    async def receive(name: str) -> None:
        async with slots.slot(Tenant(name)):
            begun.append(name)
            await asyncio.Event().wait()

    names = ["a"] * 200 + ["b"] * 200 + ["c"] * (SLOTS // 8)
    calls = [asyncio.create_task(receive(name)) for name in names]
    await asyncio.sleep(0.01)
    assert begun.count("a") == SLOTS // 2
    assert begun.count("b") == SLOTS // 4
    assert begun.count("c") == SLOTS // 8
    for call in calls[:200]:
        call.cancel()
    await asyncio.sleep(0.01)
    assert begun.count("b") == (SLOTS - SLOTS // 8) // 2
    for call in calls:
        call.cancel()


async def test_a_message_without_a_slot_is_not_received(cluster: RouterHarness) -> None:
    """Its sender may send no more than what gRPC looks ahead."""
    peer = await Http2Peer.connect(cluster.grpc)
    streams = [peer.call(GENERATE, length=MAX_MESSAGE_BYTES - 1000) for _ in range(SLOTS)]
    credits: Counter[int] = Counter()
    async with asyncio.timeout(60):
        # The tenant holds half of the slots. gRPC asks for more of those messages.
        while len([stream for stream in streams if credits[stream]]) < SLOTS // 2:
            credits += await peer.credits()
        peer.ping()
        credits += await peer.credits(until_pong=True)
    assert peer.window == RECEIVE_BYTES
    assert len([stream for stream in streams if credits[stream]]) == SLOTS // 2
    peer.close()


@pytest.mark.parametrize("cluster", [{"grpc.max_concurrent_streams": 1}], indirect=True)
async def test_a_client_opens_connections_for_more_calls_than_one_takes(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CALLS", 1)
    worker = cluster.workers["decode-0"]
    worker.may_step.clear()
    async with AsyncClient(cluster.grpc) as client, asyncio.timeout(60):
        answers = [
            asyncio.create_task(client.generate(token_ids=[9, 8], max_tokens=2).result())
            for _ in range(3)
        ]
        while len(worker.worker.sequences) < 3:
            await asyncio.sleep(0.01)
        worker.may_step.set()
        assert [len((await one).token_ids) for one in answers] == [2] * 3


async def test_a_slow_message_gives_way_to_a_tenant_without_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.api.grpc.receive_slots, "SLOW_S", 0.02)
    slots, release = ReceiveSlots(8), asyncio.Event()

    async def receive(name: str) -> str:
        async with slots.slot(Tenant(name)):
            await release.wait()
        return name

    slow = [asyncio.create_task(receive(name)) for name in "aaaabbcd"]
    await asyncio.sleep(0)
    async with asyncio.timeout(60), slots.slot(Tenant("e")):
        release.set()
    ended = await asyncio.gather(*slow, return_exceptions=True)
    refused = [name for name, one in zip("aaaabbcd", ended, strict=True) if one != name]
    assert refused == ["a"]
    assert isinstance(ended[3], ResourceExhausted), "the one that began last"


async def test_a_slot_is_not_taken_from_a_call_before_the_call_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.api.grpc.receive_slots, "SLOW_S", 0.0)
    slots = ReceiveSlots(1)

    async def receive(tenant: Tenant, release: asyncio.Event) -> None:
        async with slots.slot(tenant):
            await release.wait()

    first, second, third = (asyncio.Event() for _ in range(3))
    begun = asyncio.create_task(receive(Tenant("a"), first))
    await asyncio.sleep(0)
    given = asyncio.create_task(receive(Tenant("b", weight=0.1), second))
    await asyncio.sleep(0)
    # In one round of the loop, the first call ends and the third one comes.
    first.set()
    comes = asyncio.create_task(receive(Tenant("c"), third))
    async with asyncio.timeout(60):
        await begun
        with pytest.raises(ResourceExhausted):
            await given
        third.set()
        await comes


async def test_a_new_probe_takes_the_slot_of_the_oldest() -> None:
    slots, begun = ProbeSlots(2), list[int]()

    async def receive(number: int) -> None:
        async with slots.slot():
            begun.append(number)
            await asyncio.Event().wait()

    probes = [asyncio.create_task(receive(number)) for number in range(4)]
    async with asyncio.timeout(60):
        for probe in probes[:2]:
            with pytest.raises(DeadlineExceeded, match="send it at once"):
                await probe
    assert begun == [0, 1, 2, 3]
    assert not probes[2].done()
    assert not probes[3].done()
    for probe in probes:
        probe.cancel()


async def test_a_probe_without_a_message_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.api.grpc.receive_slots, "PROBE_S", 0.01)
    async with asyncio.timeout(60):
        with pytest.raises(DeadlineExceeded, match="send it at once"):
            async with ProbeSlots().slot():
                await asyncio.Event().wait()


async def test_watchers_of_health_do_not_hold_up_each_other(cluster: RouterHarness) -> None:
    kind = health_pb2.HealthCheckResponse
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch", response_deserializer=kind.FromString
        )
        calls = [watch(b"") for _ in range(3)]
        assert [(await one.read()).status for one in calls] == [kind.SERVING] * 3
        calls[0].cancel()
        await cluster.kill("decode-0")
        async with asyncio.timeout(60):
            for one in calls[1:]:
                assert (await one.read()).status == kind.NOT_SERVING
                one.cancel()
