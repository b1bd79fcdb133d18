"""The sockets that a router listens on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.applications import Starlette

from kvrelay.errors import ConfigError
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import listen
from kvrelay.security.guard import RoleGuard
from kvrelay.security.https import ssl_context
from router.api.grpc.auth import GrpcAccess
from router.api.grpc.health import HealthService
from router.api.grpc.messages import GrpcMessages
from router.api.http.connections.acceptor import BACKLOG, Acceptor
from router.api.http.connections.connection import MAX_HEAD_BYTES, BoundedProtocol
from router.api.http.connections.read_turns import ReadTurns
from router.process import open_files
from router.runtime.stream_reader import SLOW_READER_S

# Request size limit. It is several times a full context as text.
MAX_MESSAGE_BYTES = 4 * 2**20
# Kernel receive buffer of an HTTP connection.
RECEIVE_BYTES = 64 * 2**10
# Connections of one gRPC listener, calls of each, and calls that the event loop has not taken yet.
MAX_CONNECTIONS = 1024
MAX_STREAMS = 1024
MAX_PENDING = 8192
_CONNECTIONS = "grpc.max_allowed_incoming_connections"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC would receive megabytes of each call before anything reads its message. Without this,
    # hundreds of connections filled gigabytes, also without a valid token.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", RECEIVE_BYTES),
    # By default, gRPC cancels calls at random while more than 1000 are pending, not only those of
    # whoever sends a flood.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    # A port that is in use is an error.
    ("grpc.so_reuseport", 0),
    # Keepalive detects a client that vanished, and ends its requests.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Timeout of the pings that measure bandwidth. gRPC's default is one minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # gRPC closes a connection that pings more often than every 5 s, after 2 strikes.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.keepalive_permit_without_calls", 1),
    (_CONNECTIONS, MAX_CONNECTIONS),
    # Of one connection. Most calls of a flood wait at their client, not before the calls of others.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", MAX_HEAD_BYTES),
    # gRPC rejects at random between the soft and the hard limit, so both are equal.
    ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),
    # Covers the TLS handshake and the first HTTP/2 settings.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Applies to connections without a call. Clients reconnect by themselves.
    ("grpc.max_connection_idle_ms", 15 * 60_000),
)


def grpc_server(
    address: str,
    option: str,
    services: tuple[str, ...],
    healthy: HealthService,
    access: GrpcAccess,
    messages: GrpcMessages,
    credentials: Credentials | None = None,
) -> tuple[grpc.aio.Server, str]:
    """Returns a server with health and reflection that is not started yet, and its HOST:PORT.

    `option` names the setting of `address` in errors. Raises ConfigError if the address is not
    available. If clients must show certificates, their certificates' roles apply. A certificate
    without a role has the role client, because the CA for clients signed it.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = [access]
    if credentials is not None and credentials.files.ca is not None:
        interceptors.append(RoleGuard(without_role="client"))
    options = dict(_OPTIONS)
    options[_CONNECTIONS] = min(options[_CONNECTIONS], open_files() // 8)
    server = grpc.aio.server(interceptors=[*interceptors, messages], options=tuple(options.items()))
    try:
        port = listen(server, address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{option}: cannot listen on {address}: {error}; end the process that listens "
            "there, or choose another port"
        ) from error
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server, f"{address.rpartition(':')[0]}:{port}"


def _no_cancellation(record: logging.LogRecord) -> bool:
    """Filters cancellations out of uvicorn's log: uvicorn reports requests that the shutdown
    cancels as application errors.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


logging.getLogger("uvicorn.error").addFilter(_no_cancellation)


class HttpServer(uvicorn.Server):
    """A uvicorn server with kvrelay's acceptor. It installs no signal handlers, because the router
    handles signals.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._idle: dict[BoundedProtocol, None] = {}
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        await super().startup(sockets=[])
        self._turns = ReadTurns()
        acceptor = Acceptor(self._listener, self._protocol, self.config.ssl)
        self._accepting = asyncio.create_task(acceptor.run())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, closes the listener and ends the open requests."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._listener.close()
        await super().shutdown(sockets=[])

    def _protocol(self) -> asyncio.Protocol:
        protocol = BoundedProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.idle = self._idle
        protocol.turns = self._turns
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the router handles signals."""
        yield


def http_server(
    app: Starlette, address: str, option: str, credentials: Credentials | None = None
) -> tuple[HttpServer, str]:
    """Returns a server that is not started yet, and its HOST:PORT. Raises ConfigError."""
    listener = http_listener(address, option)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    if credentials is not None:
        # A later load would replace the TLS context below.
        config.load()
        config.ssl = ssl_context(credentials)
    return HttpServer(config, listener), f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def http_listener(address: str, option: str) -> socket.socket:
    """Returns a socket that listens on HOST:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    listener = None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit this timeout. It ends a connection whose peer acknowledges no data.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOW_READER_S * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Bounds the unread data of a connection, which the event loop reads in one piece.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"{option}: cannot listen on {address}: {error}; end the process that listens "
            "there, or choose another port"
        ) from error
    return listener
