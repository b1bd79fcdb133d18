"""Accepts HTTP connections. TLS handshakes are bounded in time and number, and idle connections
make room for new connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from kvrelay.process.telemetry import get_logger
from router.runtime.stream_reader import SLOW_READER_S

HANDSHAKE_S = 10.0
# Limit on concurrent handshakes. Above it, the oldest handshake is cancelled.
MAX_HANDSHAKES = 256
BACKLOG = 2048
# Connections accepted per event loop round.
PER_ROUND = 2
# Pause after a failed accept. The usual cause is a lack of file descriptors.
PAUSE_S = 0.5

# Answer to a client that speaks HTTP where TLS is expected.
_TOLD = b"This port speaks HTTPS only; begin with https://.\n"
_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TOLD), _TOLD)
)

log = get_logger("router.http")


class Acceptor:
    """Accepts connections from a listening socket. The caller owns and closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def run(self) -> None:
        """Accepts connections until cancelled, then cancels the open handshakes."""
        self._listener.setblocking(False)
        try:
            while True:
                for _ in range(PER_ROUND):
                    await self._accept()
                # An accept that need not wait does not yield to the event loop.
                await asyncio.sleep(0)
        finally:
            for task in self._handshakes:
                task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = await loop.sock_accept(self._listener)
        except OSError as error:
            log.warning("accept_failed", reason=str(error), pause_s=PAUSE_S)
            await asyncio.sleep(PAUSE_S)
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            next(iter(self._handshakes)).cancel()
        task = loop.create_task(self._open(connection))
        self._handshakes[task] = None
        task.add_done_callback(self._handshakes.pop)

    async def _open(self, connection: socket.socket) -> None:
        timeout_s, spare = None, None
        try:
            if self._context is not None:
                timeout_s, spare = HANDSHAKE_S, connection.dup()
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
                # The close waits until the client has read the answer.
                ssl_shutdown_timeout=None if self._context is None else SLOW_READER_S,
            )
        # The peer speaks no TLS, sends no certificate, or sends nothing.
        except OSError as error:
            connection.close()
            if spare is not None and getattr(error, "reason", "") == "HTTP_REQUEST":
                with suppress(OSError):
                    spare.send(_PLAIN)
        finally:
            if spare is not None:
                spare.close()
