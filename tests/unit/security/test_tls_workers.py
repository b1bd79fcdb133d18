"""Real workers under TLS: who gets in, and what is said of transports that TLS does not protect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs
from support.certificates import Certificates, all_roles
from support.worker_harness import workers

import decode_worker.main
from autoscaler.worker_drain import drain_worker
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, Unavailable
from kvrelay.process.stop_request import StopRequest
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.security.tls_roles import WORKER_NAME
from kvrelay.wire.transfer import kv_push
from kvrelay.wire.worker import WorkerServiceStub, pb
from kvrelay.worker.runtime import grpc_server
from kvrelay.worker.runtime.grpc_server import worker_server
from kvrelay.worker.runtime.settings import WorkerSettings


def config(made: Certificates | None, transport: str = "auto") -> ClusterConfig:
    security = {} if made is None else made.security.model_dump()
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"block_size": 16, "memory": "2MiB"},
            "transfer": {"transport": transport},
            "security": security,
        }
    )


async def test_routers_and_workers_are_let_in_for_their_own_calls_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    made = all_roles(tmp_path)
    router, worker = (Credentials.internal(made.security, role) for role in ("router", "worker"))
    async with workers(tiny_model("llama"), config(made), "decode-0") as running:
        (info,) = await running.registry.workers()
        for credentials, calls in (
            (router, {"push": False, "drain": True}),
            (worker, {"push": True, "drain": False}),
        ):
            async with worker_channel(info.address, credentials) as channel:
                push = kv_push(channel)()
                await push.done_writing()
                refused = await push.code() is grpc.StatusCode.PERMISSION_DENIED
                assert refused != calls["push"]
                try:
                    await WorkerServiceStub(channel).GetWorkerStatus(
                        pb.GetWorkerStatusRequest(), timeout=20
                    )
                    refused = False
                except grpc.aio.AioRpcError as error:
                    refused = error.code() is grpc.StatusCode.PERMISSION_DENIED
                assert refused != calls["drain"]
        with pytest.raises(Unavailable):
            await drain_worker(info.address, 1.0, None)
        admin = [
            (tmp_path / name).read_bytes() for name in ("ca.pem", "admin-key.pem", "admin.pem")
        ]
        options = [("grpc.ssl_target_name_override", WORKER_NAME)]
        async with grpc.aio.secure_channel(
            info.address, grpc.ssl_channel_credentials(*admin), options
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="the certificate has admin"):
                await WorkerServiceStub(channel).Drain(pb.DrainRequest(), timeout=60)
        (info,) = await running.registry.workers()
        assert info.state == "ready", "none of these drained it"
        await drain_worker(info.address, 60.0, router)
        assert (await running.session("decode-0")).info.worker_id == "decode-0"


@pytest.mark.parametrize(
    ("tls", "transport", "warned"), [(True, "gloo", 1), (True, "grpc", 0), (False, "gloo", 0)]
)
async def test_a_transport_beside_tls_is_warned_of_at_the_start(
    tiny_model: Callable[..., Path], tmp_path: Path, tls: bool, transport: str, warned: int
) -> None:
    made = all_roles(tmp_path) if tls else None
    with capture_logs() as logs:
        async with workers(tiny_model("llama"), config(made, transport), "decode-0"):
            pass
    found = [line for line in logs if line["event"] == "kv_transfer_not_encrypted"]
    assert [(line["transport"], line["log_level"]) for line in found] == [
        (transport, "warning")
    ] * warned


async def test_a_worker_with_a_routers_certificate_does_not_start(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    made = all_roles(tmp_path)
    made.issue("router", "worker")
    settings = WorkerSettings(
        "decode-0", "decode", str(tiny_model("llama")), "unix:///nowhere", config(made)
    )
    with pytest.raises(ConfigError, match="has the role router; it must have the role worker"):
        await decode_worker.main.serve(settings, StopRequest())


@asynccontextmanager
async def silent(made: Certificates, number: int) -> AsyncIterator[set[asyncio.Task[bytes]]]:
    """Connections to a worker's server that say nothing; each task lasts as long as its
    connection.
    """
    async with worker_server(
        "127.0.0.1", 2**20, Credentials.internal(made.security, "worker"), None
    ) as (
        server,
        address,
    ):
        await server.start()
        port = int(address.rpartition(":")[2])
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
        yield {asyncio.create_task(reader.read()) for reader, _ in connections}
        for _, writer in connections:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_connections_that_say_nothing_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 6)
    async with silent(all_roles(tmp_path), 16) as connections:
        pending = connections
        async with asyncio.timeout(30):
            while len(pending) > 6:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert len(pending) == 6


async def test_connections_that_say_nothing_do_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 300)
    async with silent(all_roles(tmp_path), 4) as connections, asyncio.timeout(30):
        await asyncio.gather(*connections)
