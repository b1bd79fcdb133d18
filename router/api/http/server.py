"""The router's HTTP server and its socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from kvrelay.process.shared_port import share
from kvrelay.process.tcp_address import cannot_listen, socket_for
from kvrelay.security.credentials import Credentials
from kvrelay.security.https import ssl_context
from router.api.http.connections.acceptor import BACKLOG, Acceptor
from router.api.http.connections.connection import BoundedProtocol
from router.api.http.connections.read_turns import ReadTurns
from router.runtime.stream_reader import SLOW_READER_S

# Kernel receive buffer of an HTTP connection.
RECEIVE_BYTES = 64 * 2**10


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
    app: Starlette,
    address: str,
    option: str,
    credentials: Credentials | None = None,
    *,
    is_shared: bool = False,
) -> tuple[HttpServer, str]:
    """Returns a server that is not started yet, and its HOST:PORT. is_shared: other processes
    listen there, too. Raises ConfigError.
    """
    listener = http_listener(address, option, is_shared=is_shared)
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


def http_listener(address: str, option: str, *, is_shared: bool = False) -> socket.socket:
    """Returns a socket that listens on HOST:PORT. Raises ConfigError."""
    listener = None
    try:
        listener, target = socket_for(address)
        if is_shared:
            share(listener)
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
        raise cannot_listen(option, address, error) from error
    return listener
