"""A gRPC port that several servers share: who waits for whom, and who gets the port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from http2_peer import Http2Peer
from structlog.testing import capture_logs
from support.router_harness import running_router

import router.api.grpc.listener
from kvrelay.errors import ConfigError
from kvrelay.wire.inference import SERVICE_NAME, InferenceServiceStub, pb
from kvrelay.worker.runtime.grpc_server import worker_server
from router.api.grpc import io_threads
from router.api.grpc.listener import MAX_STREAMS
from router.api.grpc.service import InferenceService
from router.process import FILES

LIST = f"/{SERVICE_NAME}/ListModels"
ATTACKERS, VICTIMS = 4, 16


async def connected(address: str) -> tuple[Http2Peer, socket.socket]:
    """A peer that has read everything that the server has sent, and its socket."""
    peer = await Http2Peer.connect(address)
    peer.ping()
    await peer.credits(until_pong=True)
    return peer, peer.socket


def begin(peers: list[tuple[Http2Peer, socket.socket]], calls: int) -> None:
    """Begins calls, and blocks the event loop until gRPC has received them."""
    for peer, _ in peers:
        for _ in range(calls):
            peer.call(LIST)
        peer.ping()
    for _, one in peers:
        assert select.select([one], [], [], 60)[0]


async def test_calls_of_one_connection_do_not_wait_for_all_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel draws a server for each connection. A victim has that of an attacker with a
    probability of 1 in 16.
    """
    served: list[int] = []
    all_served = asyncio.Event()
    list_models = InferenceService.ListModels

    async def noted(
        self: InferenceService, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        served.append(int(context.peer().rpartition(":")[2]))
        if len(served) == ATTACKERS * MAX_STREAMS + VICTIMS:
            all_served.set()
        return await list_models(self, request, context)

    monkeypatch.setattr(InferenceService, "ListModels", noted)
    # As many servers as with a high limit on open files.
    monkeypatch.setattr(router.api.grpc.listener, "open_files", lambda: FILES)
    async with running_router(prefill=0) as cluster, asyncio.timeout(60):
        attackers = [await connected(cluster.grpc) for _ in range(ATTACKERS)]
        victims = [await connected(cluster.grpc) for _ in range(VICTIMS)]
        begin(attackers, MAX_STREAMS)
        begin(victims, 1)
        await all_served.wait()
        ports = {one.getsockname()[1] for _, one in victims}
        places = [place for place, port in enumerate(served) if port in ports]
        half_way = ATTACKERS * MAX_STREAMS // 2
        assert sum(place < half_way for place in places) >= VICTIMS // 2, places
        for peer, _ in (*attackers, *victims):
            peer.close()


async def test_a_client_may_begin_any_number_of_calls_on_one_connection() -> None:
    """Those beyond the limit wait at the client."""
    async with (
        running_router(prefill=0) as cluster,
        asyncio.timeout(120),
        grpc.aio.insecure_channel(cluster.grpc) as channel,
    ):
        stub = InferenceServiceStub(channel)

        async def calls() -> None:
            for _ in range(3):
                await stub.ListModels(pb.ListModelsRequest())

        await asyncio.gather(*(calls() for _ in range(3 * MAX_STREAMS)))


@contextlib.asynccontextmanager
async def listening(kind: str) -> AsyncIterator[str]:
    """HOST:PORT of a port of the router, or of a worker."""
    if kind == "worker":
        async with worker_server("127.0.0.1", 1000, None, None) as (server, address):
            await server.start()
            yield address
    else:
        async with running_router(prefill=0) as cluster:
            yield getattr(cluster, kind)


def odd_paths(number: int) -> list[str]:
    """Bytes of any value, of any length that a literal of HPACK has in one byte."""
    draw = random.Random(number)
    return [
        os.fsdecode(b"/" * draw.randrange(2) + draw.randbytes(draw.choice([0, 1, 2, 3, 50, 120])))
        for _ in range(40)
    ]


@pytest.mark.parametrize("kind", ["grpc", "admin", "worker"])
async def test_a_path_of_any_bytes_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(router.api.grpc.listener, "MAX_SERVERS", 1)
    async with listening(kind) as address, asyncio.timeout(120):
        for path in ["/\udcff", *odd_paths(0)]:
            peer = await Http2Peer.connect(address)
            peer.call(path)
            # The server answers the call, or closes the connection.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                peer.ping()
                await peer.credits(until_pong=True)
            peer.close()
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await channel.unary_unary("/a.Service/Method")(b"", wait_for_ready=True)
    # With a valid token the router would say the former.
    assert ended.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


def nice_of_reading() -> set[int]:
    """The nice values of gRPC's threads in this process."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        # A thread may have ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (thread / "comm").read_text() == "event_engine\n":
                found.add(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found


async def test_the_event_loop_has_more_of_a_core_than_the_reading_of_a_flood() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with running_router(prefill=0):
        assert nice_of_reading() == {min(19, own + 10)}
        assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_sandbox_that_forbids_priorities_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbid)
    monkeypatch.setattr(io_threads, "_NAMES", {Path("/proc/self/comm").read_text().strip()})
    with capture_logs() as lines:
        io_threads.lower_priority()
    assert [one["event"] for one in lines] == ["grpc_priority_not_lowered"]


async def test_two_routers_do_not_share_a_port() -> None:
    """As the servers of one router do."""
    async with running_router(prefill=0) as cluster:
        with pytest.raises(ConfigError, match=f"listen.grpc: cannot listen on {cluster.grpc}: "):
            router.api.grpc.listener.GrpcListener(
                cluster.grpc,
                "listen.grpc",
                (),
                *[None] * 3,  # type: ignore[arg-type]
            )
