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
from router.api.grpc.messages import GrpcMessages
from router.api.http.acceptor import BACKLOG, Acceptor
from router.api.http.protocol import MAX_HEAD_BYTES, SLOW_READER_S, BoundedProtocol
from router.api.http.read_turns import ReadTurns

MAX_MESSAGE_BYTES = 4 * 2**20  # of a request: a full context as text, several times over
RECEIVE_BYTES = 64 * 2**10  # of an HTTP connection, in the kernel
MAX_CONNECTIONS = 1024  # of a gRPC listener; each has as many streams as the next says
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is in use is an error
    # A client that vanished without a word is noticed, and its work ended
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of those that gRPC sends to measure bandwidth, by default a minute
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # who pings more often
    ("grpc.http2.max_ping_strikes", 2),  # more often than that is shut out
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", 4096),  # of one connection; a load test's are on one
    ("grpc.max_metadata_size", MAX_HEAD_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),  # between the two, gRPC would draw lots
    ("grpc.server_handshake_timeout_ms", 20_000),  # of TLS, and to the first settings of HTTP/2
    # Without a call; clients connect again by themselves
    ("grpc.max_connection_idle_ms", 15 * 60_000),
)


def grpc_server(
    address: str,
    option: str,
    services: tuple[str, ...],
    access: GrpcAccess,
    messages: GrpcMessages,
    credentials: Credentials | None = None,
) -> tuple[grpc.aio.Server, str, health.aio.HealthServicer]:
    """A server with health and reflection, not yet started, and the HOST:PORT that it has.

    `option` names the setting that `address` comes from. Raises ConfigError if it cannot be had.
    Clients that have to show certificates are held to their roles; one without a role is a
    client's, since the CA for clients signed it.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = [access]
    if credentials is not None and credentials.files.ca is not None:
        interceptors.append(RoleGuard(without_role="client"))
    server = grpc.aio.server(interceptors=[*interceptors, messages], options=_OPTIONS)
    try:
        port = listen(server, address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"{option}: cannot listen on {address}; is it in use? {error}") from error
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    return server, f"{address.rpartition(':')[0]}:{port}", servicer


def _no_cancellation(record: logging.LogRecord) -> bool:
    """Requests that the end of a server cuts off are no errors of the application, as uvicorn calls
    them.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


logging.getLogger("uvicorn.error").addFilter(_no_cancellation)


class HttpServer(uvicorn.Server):
    """uvicorn without hands on the process's signals, which the router has, and with an acceptor of
    our own.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._idle: dict[BoundedProtocol, None] = {}
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._turns = ReadTurns()
        acceptor = Acceptor(self._listener, self._protocol, self.config.ssl)
        self._accepting = asyncio.create_task(acceptor.run())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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
        yield


def http_server(
    app: Starlette, address: str, option: str, credentials: Credentials | None = None
) -> tuple[HttpServer, str]:
    """A server, and the HOST:PORT that it has. Raises ConfigError."""
    listener = http_listener(address, option)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    if credentials is not None:
        config.load()  # which would make a context of its own
        config.ssl = ssl_context(credentials)
    return HttpServer(config, listener), f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def http_listener(address: str, option: str) -> socket.socket:
    """A socket that listens on `address`, HOST:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    listener = None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: one whose peer takes nothing off our hands for so long is over.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOW_READER_S * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # What a connection may send before it is read; the event loop takes it in one piece.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"{option}: cannot listen on {address}; is it in use? {error}") from error
    return listener
