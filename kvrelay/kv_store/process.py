"""The process of a store: its listener, its log and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.config.security import SecurityConfig
from kvrelay.errors import ConfigError
from kvrelay.kv_store.block_store import BlockStore
from kvrelay.kv_store.service import KvStoreService
from kvrelay.loopback import is_loopback
from kvrelay.process.held_port import held_port
from kvrelay.process.stop_request import StopRequest
from kvrelay.process.tcp_address import cannot_listen
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.guard import RoleGuard
from kvrelay.wire.store import FRAME_BYTES, add_kv_store_servicer
from kvrelay.worker.runtime.grpc_server import worker_server

# Seconds between two looks at the certificates, and two lines of the log.
_LOG_S = 60.0
# Bytes of a frame beside its blocks.
_EXTRA_BYTES = 2**16

log = get_logger("kv_store")


async def serve(
    listen: str,
    security: SecurityConfig,
    blocks: BlockStore,
    ready: Callable[[str], None],
    stop: StopRequest,
) -> None:
    """Serves `blocks` at HOST:PORT until `stop` is set. Calls in progress then have a second.

    `ready` receives the line `kvrelay kv-store ready HOST:PORT`. Raises ConfigError if the address
    is not available, if others can reach it and there is no TLS, and for invalid certificates.
    """
    if security.tls is None and not is_loopback(listen):
        raise ConfigError(
            f"--listen: {listen} is not a loopback address and needs security.tls; set it in the "
            "file of --config, or listen on 127.0.0.1, localhost or [::1]"
        )
    credentials = Credentials.internal(security, "worker")
    guard = None if credentials is None else RoleGuard()
    host, _, port = listen.rpartition(":")
    service = KvStoreService(blocks)
    try:
        # gRPC would write a line of its own.
        with held_port(listen):
            pass
        async with worker_server(
            host, FRAME_BYTES + _EXTRA_BYTES, credentials, guard, port=int(port)
        ) as (
            server,
            address,
        ):
            add_kv_store_servicer(
                service.Find,
                service.Get,
                service.Put,
                service.Forget,
                service.GetStoreStatus,
                server,
            )
            await server.start()
            ready(f"kvrelay kv-store ready {address}")
            telling = asyncio.create_task(_tell(service, credentials, guard))
            try:
                await stop.drain.wait()
            finally:
                telling.cancel()
    except (OSError, RuntimeError) as error:
        raise cannot_listen("--listen", listen, error) from None
    _log_status(service)


async def _tell(
    service: KvStoreService, credentials: Credentials | None, guard: RoleGuard | None
) -> None:
    """Logs what the store holds, and what is wrong with certificates."""
    while True:
        await asyncio.sleep(_LOG_S)
        _log_status(service)
        if credentials is not None and guard is not None:
            credentials.trouble()
            guard.tell_of_ended()


def _log_status(service: KvStoreService) -> None:
    status = service.status
    log.info(
        "kv_store_status",
        used_bytes=status.used_bytes,
        size_bytes=status.size_bytes,
        blocks=status.blocks,
        tenants=status.tenants,
        stored=status.stored,
        evicted=status.evicted,
        found=status.found,
    )
