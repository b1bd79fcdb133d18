"""Each internal call is for one role; everybody else is refused before the handler runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from structlog.testing import capture_logs
from support.certificates import DAY, Certificates, all_roles

from kvrelay.security.authority import Authority
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import listen, worker_channel
from kvrelay.security.guard import ALLOWED, RoleGuard
from kvrelay.security.key_pair import Files
from kvrelay.security.tls_roles import ROLES, WORKER_NAME
from kvrelay.v1 import cluster_pb2, inference_pb2, store_pb2, transfer_pb2, worker_pb2

FILES = (worker_pb2, transfer_pb2, store_pb2, cluster_pb2, inference_pb2)
METHODS = [
    (service.full_name, method)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves every method of every proto file; knows which handlers ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.answer = asyncio.Event()
        self.answer.set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method
        _, method = next(one for one in METHODS if f"/{one[0]}/{one[1].name}" == name)

        async def answers(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            self.ran.append(name)
            await self.answer.wait()
            yield b""

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            self.ran.append(name)
            return b""

        kind = "_".join(
            "stream" if one else "unary"
            for one in (method.client_streaming, method.server_streaming)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answers if method.server_streaming else answer)


@asynccontextmanager
async def serving(
    credentials: Credentials | None, guard: RoleGuard
) -> AsyncIterator[tuple[str, Recorder]]:
    recorder = Recorder()
    server = grpc.aio.server(interceptors=[guard])
    server.add_generic_rpc_handlers((recorder,))
    port = listen(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", recorder
    finally:
        await server.stop(None)


async def status_of(channel: grpc.aio.Channel, service: str, method: Any) -> grpc.StatusCode:
    kind = "_".join(
        "stream" if one else "unary" for one in (method.client_streaming, method.server_streaming)
    )
    # GRPC ends a call as cancelled if an iterator of it fails late
    request = () if method.client_streaming else (b"",)
    call = getattr(channel, kind)(f"/{service}/{method.name}")(*request, timeout=60)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def channel_of(address: str, made: Certificates, name: str) -> grpc.aio.Channel:
    pair = [(made.folder / f"{name}{part}.pem").read_bytes() for part in ("-key", "")]
    credentials = grpc.ssl_channel_credentials((made.folder / "ca.pem").read_bytes(), *pair)
    return grpc.aio.secure_channel(
        address, credentials, [("grpc.ssl_target_name_override", WORKER_NAME)]
    )


def test_the_table_knows_every_service() -> None:
    assert {service for service, _ in METHODS} <= set(ALLOWED)
    internal = {name for name, roles in ALLOWED.items() if {"router", "worker"} & set(roles)}
    assert internal == {
        "kvrelay.v1.WorkerService",
        "kvrelay.v1.KvTransferService",
        "kvrelay.v1.KvStoreService",
        "grpc.health.v1.Health",
    }


async def test_each_method_is_for_its_roles_alone(tmp_path: Path) -> None:
    made = all_roles(tmp_path)
    async with serving(Credentials.internal(made.security, "worker"), RoleGuard()) as (
        address,
        recorder,
    ):
        for role in ROLES:
            async with channel_of(address, made, role) as channel:
                for service, method in METHODS:
                    recorder.ran.clear()
                    with capture_logs() as logs:
                        code = await status_of(channel, service, method)
                    if role in ALLOWED[service]:
                        assert (code, recorder.ran) == (
                            grpc.StatusCode.OK,
                            [f"/{service}/{method.name}"],
                        ), (role, logs)
                    else:
                        assert (code, recorder.ran) == (grpc.StatusCode.PERMISSION_DENIED, []), (
                            role,
                            method.name,
                        )
                        assert [line["method"] for line in logs] == [f"/{service}/{method.name}"]
                        assert role in logs[0]["reason"]


async def test_a_certificate_without_a_role_is_nobodys(tmp_path: Path) -> None:
    made = all_roles(tmp_path)
    made.write("nobody", made.by_hand(()))
    service, method = METHODS[0]
    async with serving(Credentials.internal(made.security, "worker"), RoleGuard()) as (
        address,
        recorder,
    ):
        async with channel_of(address, made, "nobody") as channel:
            assert await status_of(channel, service, method) is grpc.StatusCode.UNAUTHENTICATED
        assert recorder.ran == []


async def test_where_clients_have_a_ca_of_their_own_a_certificate_without_a_role_is_a_clients(
    tmp_path: Path,
) -> None:
    made = all_roles(tmp_path)
    made.write("nobody", made.by_hand(()))
    files = Files(
        f"{tmp_path}/worker.pem",
        f"{tmp_path}/worker-key.pem",
        f"{tmp_path}/ca.pem",
        None,
        ("server",),
        "x",
    )
    found = {}
    async with (
        serving(Credentials(files), RoleGuard(without_role="client")) as (address, _),
        channel_of(address, made, "nobody") as channel,
    ):
        for service, method in METHODS:
            found[service] = await status_of(channel, service, method)
    allowed = {service for service, code in found.items() if code is grpc.StatusCode.OK}
    assert allowed == {"kvrelay.v1.InferenceService"}


async def test_who_shows_no_certificate_of_the_ca_does_not_get_beyond_the_handshake(
    tmp_path: Path,
) -> None:
    made = all_roles(tmp_path)
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other", Authority(DAY))
    other.issue("router")
    stranger = [(other.folder / name).read_bytes() for name in ("router-key.pem", "router.pem")]
    ca = (made.folder / "ca.pem").read_bytes()
    override = [("grpc.ssl_target_name_override", WORKER_NAME)]
    async with serving(Credentials.internal(made.security, "worker"), RoleGuard()) as (
        address,
        recorder,
    ):
        channels: Sequence[grpc.aio.Channel] = (
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), override),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *stranger), override),
        )
        for channel in channels:
            async with channel:
                assert await status_of(channel, *METHODS[0]) is grpc.StatusCode.UNAVAILABLE
        assert recorder.ran == []


async def test_nobody_passes_for_a_worker_without_a_workers_certificate(tmp_path: Path) -> None:
    """A router that is sent to another address, by a forged entry in Redis, tells nothing to who
    answers there.
    """
    made = all_roles(tmp_path)
    router = Credentials.internal(made.security, "router")
    for impostor in ("router", "admin", "client"):
        files = Files(
            f"{tmp_path}/{impostor}.pem", f"{tmp_path}/{impostor}-key.pem", None, None, (), "x"
        )
        async with serving(Credentials(files), RoleGuard()) as (address, recorder):
            async with worker_channel(address, router) as channel:
                assert await status_of(channel, *METHODS[0]) is grpc.StatusCode.UNAVAILABLE
            assert recorder.ran == []
    async with serving(None, RoleGuard()) as (address, recorder):
        async with worker_channel(address, router) as channel:
            assert await status_of(channel, *METHODS[0]) is grpc.StatusCode.UNAVAILABLE
        assert recorder.ran == []


async def test_without_tls_a_guard_lets_nobody_in() -> None:
    async with (
        serving(None, RoleGuard()) as (address, recorder),
        grpc.aio.insecure_channel(address) as channel,
    ):
        for service, method in METHODS:
            assert await status_of(channel, service, method) is grpc.StatusCode.UNAUTHENTICATED
        assert recorder.ran == []


async def test_a_peers_certificate_that_ends_during_a_call_is_told_of_once(tmp_path: Path) -> None:
    made = all_roles(tmp_path)
    guard = RoleGuard()
    later = datetime.now(UTC) + 100 * DAY
    async with serving(Credentials.internal(made.security, "worker"), guard) as (address, recorder):
        recorder.answer.clear()
        async with channel_of(address, made, "router") as channel:
            call = channel.stream_stream("/kvrelay.v1.WorkerService/Session")()
            async with asyncio.timeout(60):
                while not recorder.ran:
                    await asyncio.sleep(0.01)
            with capture_logs() as logs:
                guard.tell_of_ended()
                assert logs == []
                for _ in range(3):
                    guard.tell_of_ended(later)
            assert [(line["role"], line["log_level"]) for line in logs] == [("router", "warning")]
            recorder.answer.set()
            assert [message async for message in call] == [b""], "its calls go on"
            with capture_logs() as logs:
                guard.tell_of_ended(later)
            assert logs == []
