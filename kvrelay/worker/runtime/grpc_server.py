"""The gRPC server of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import listen
from kvrelay.security.guard import RoleGuard

# Seconds for the last events to reach the routers.
STOP_GRACE_S = 1.0
# Connections of routers and workers, one each.
MAX_CONNECTIONS = 1024
# Milliseconds for TLS and for the first HTTP/2 settings.
HANDSHAKE_MS = 10_000
# Holds a prompt of a million token ids and more.
MAX_MESSAGE_BYTES = 16 * 2**20


@asynccontextmanager
async def worker_server(
    host: str,
    max_message_bytes: int,
    credentials: Credentials | None,
    guard: RoleGuard | None,
    *,
    port: int = 0,
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """A server on a port of `host`, 0 for a free one, and its HOST:PORT. Not yet started. Raises
    RuntimeError if the port is not available.
    """
    server = grpc.aio.server(
        interceptors=() if guard is None else (guard,),
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            # Detects a frozen or unreachable router, and frees what it held here.
            ("grpc.keepalive_time_ms", 5000),
            ("grpc.keepalive_timeout_ms", 5000),
            # Timeout of the pings that measure bandwidth; the default is a minute.
            ("grpc.http2.ping_timeout_ms", 5000),
            # Peers ping often to detect a frozen process. The server must not treat that as abuse.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.keepalive_permit_without_calls", 1),
            # Limits idle connections in number and time, so that they cannot exhaust memory.
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ],
    )
    bound = listen(server, f"{host}:{port}", credentials)
    try:
        yield server, f"{host}:{bound}"
    finally:
        await server.stop(STOP_GRACE_S)
