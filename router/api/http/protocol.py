"""uvicorn's HTTP/1.1 protocol, with bounds against clients that only keep connections busy."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Hashable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.api.http.read_turns import ReadTurns
from router.api.http.responses import to_json

# Connections of one listener.
MAX_CONNECTIONS = 4096
# Size of the request line and headers.
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEAD_LINES = 256
# Number of chunks that a body may have at any size. Above it, chunks must have CHUNK_BYTES on
# average.
FREE_CHUNKS = 256
CHUNK_BYTES = 256
# Timeout for a request, from its first byte (or from the connection) to its last.
RECEIVE_S = 30.0
# Timeout for a client to read what the router has sent.
SLOW_READER_S = 60.0
_PIECE = 1024
_WORDS = {
    400: "this is not an HTTP/1.1 request",
    408: f"the request did not come within {RECEIVE_S:g} s",
    413: f"the body comes in many small chunks; send at least {CHUNK_BYTES} bytes in each",
    431: f"the request's headers are over {MAX_HEAD_BYTES} bytes or {MAX_HEAD_LINES} lines",
    505: "the request is not HTTP/1; send it as HTTP/1.1",
}
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)


class BoundedConnection(h11.Connection):
    """h11 accepts a head of any size if all of it has arrived, and spends as much on a chunk of one
    byte as on a large one. This class bounds both.
    """

    _chunked = False
    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        """Returns h11's next event. Raises h11.RemoteProtocolError for a head or chunks over the
        bounds.
        """
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError(_WORDS[505], error_status_hint=505)
            event = _in_origin_form(event)
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            # Two headers that disagree about the end of a body allow request smuggling past a proxy
            # (RFC 9112, 6.1).
            if self._chunked and any(name == b"content-length" for name, _ in event.headers):
                raise h11.RemoteProtocolError(_WORDS[400], error_status_hint=400)
            self._chunks = self._bytes = 0
        elif self._chunked and isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError(_WORDS[413], error_status_hint=413)
        return event

    def _check_head(self) -> None:
        """Checks the head before h11 parses it, because h11 creates an object for each line."""
        head = self.trailing_data[0][: MAX_HEAD_BYTES + 1]
        ends = [at for at in (head.find(b"\r\n\r\n"), head.find(b"\n\n")) if at >= 0]
        lines = head.count(b"\n", 0, min(ends, default=len(head)))
        if lines > MAX_HEAD_LINES or (not ends and len(head) > MAX_HEAD_BYTES):
            raise h11.RemoteProtocolError(_WORDS[431], error_status_hint=431)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Returns the request with the path of its target, if that is a whole URL. The URL's authority
    replaces the header Host (RFC 9112, 3.2.2), so that no check sees another host.
    """
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        return request
    host, path = absolute.groups()
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", host), *(one for one in request.headers if one[0] != b"host")],
        http_version=request.http_version,
    )


class BoundedProtocol(H11Protocol):
    """Adds bounds to uvicorn's protocol.

    uvicorn bounds the idle time between two requests of a connection and the memory of each
    connection. It does not bound the time that a request takes to arrive, the time that an answer
    stays unread, or the number of connections.
    """

    # The listener's connections without a running request, oldest first.
    idle: dict[BoundedProtocol, None]
    # Shared by the listener's connections.
    turns: ReadTurns

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.conn = BoundedConnection(h11.SERVER, MAX_HEAD_BYTES)

    _receiving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _unread_data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the receive timeout. Above MAX_CONNECTIONS, aborts the oldest idle connection, or
        this connection if none is idle.
        """
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            transport.abort()
            return
        self.idle[self] = None
        self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the connection's timeouts."""
        self._received()
        self.idle.pop(self, None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads the data when it is this connection's turn. Receives nothing more until then."""
        self._unset_keepalive_if_required()
        waits = bool(self._unread_data)
        self._unread_data += data
        if waits or not self.turns.take(self._who(), self._read):
            self.transport.pause_reading()

    def _who(self) -> Hashable:
        """Returns the tenant of the connection's last request, or the client's address before the
        first request.
        """
        tenant = self.scope["state"].get("tenant") if self.scope else None
        return tenant.name if tenant else (self.client[0] if self.client else None, None)

    def _read(self) -> None:
        """Feeds the data to h11 in pieces, because h11 accepts a head of any size that arrives at
        once.
        """
        data, self._unread_data = self._unread_data, b""
        while data and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.conn.receive_data(data[:_PIECE])
            self.handle_events()
            data = data[_PIECE:]
        if data and not self.transport.is_closing():
            super().data_received(data)
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def handle_events(self) -> None:
        """Handles h11's events and starts or cancels the receive timeout."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle.pop(self, None)
        # The client has more of the request to send.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
            if begun and self._receiving is None:
                self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)
        else:
            self._received()

    def on_response_complete(self) -> None:
        """Marks the connection as idle."""
        self._received()
        if not self.transport.is_closing():
            self.idle[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Pauses writing and aborts the connection if it lasts SLOW_READER_S."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(SLOW_READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Resumes writing and cancels the slow reader's timeout."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Answers a request that h11 rejects, with h11's status and in the shape of all errors.
        uvicorn calls this method.
        """
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(hint if hint in _WORDS else 400)

    def _make_room(self) -> bool:
        """Aborts the connection that has been idle for longest. Returns False if no connection is
        idle.
        """
        oldest = next(iter(self.idle), None)
        if oldest is not None:
            del self.idle[oldest]
            oldest.transport.abort()
        return oldest is not None

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _too_slow(self) -> None:
        self._receiving = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408)
        # No byte has arrived, or the answer has begun.
        else:
            self.transport.abort()

    def _refuse(self, status: int) -> None:
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            kind = "invalid_request_error"
            error: dict[str, Any] = {
                "message": _WORDS[status],
                "type": kind,
                "param": None,
                "code": status,
            }
            body = to_json({"error": error}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
