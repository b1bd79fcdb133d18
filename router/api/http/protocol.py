"""HTTP/1.1 as uvicorn speaks it, with bounds on who only keeps a connection busy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Hashable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.api.http.read_turns import ReadTurns
from router.api.http.responses import to_json

MAX_CONNECTIONS = 4096  # of the listener
MAX_HEAD_BYTES = 16 * 2**10  # of a request's line and headers
MAX_HEAD_LINES = 256
FREE_CHUNKS = 256  # of a body, and more at this many bytes each on average
CHUNK_BYTES = 256
RECEIVE_S = 30.0  # for a request to come, from its first byte, or from the connection, to its last
SLOW_READER_S = 60.0  # for a client to make room for what is sent
_PIECE = 1024
_WORDS = {
    400: "this is not an HTTP/1.1 request",
    408: f"the request did not come within {RECEIVE_S:g} s",
    413: f"the body comes in many small chunks; send at least {CHUNK_BYTES} bytes in each",
    431: f"the request's headers are over {MAX_HEAD_BYTES} bytes or {MAX_HEAD_LINES} lines",
}


class BoundedConnection(h11.Connection):
    """h11 takes a head of any size, if all of it is there, and a chunk of one byte at the cost of a
    large one.
    """

    _chunked = False
    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_head()
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            # Two answers to where a body ends would let somebody smuggle a request past a proxy
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
        """Of a request that has not begun: h11 would make an object of each of its lines."""
        head = self.trailing_data[0][: MAX_HEAD_BYTES + 1]
        ends = [at for at in (head.find(b"\r\n\r\n"), head.find(b"\n\n")) if at >= 0]
        lines = head.count(b"\n", 0, min(ends, default=len(head)))
        if lines > MAX_HEAD_LINES or (not ends and len(head) > MAX_HEAD_BYTES):
            raise h11.RemoteProtocolError(_WORDS[431], error_status_hint=431)


class BoundedProtocol(H11Protocol):
    """uvicorn bounds the time between two requests of a connection, and what it holds in memory for
    each; not how long a request may take to come, nor how long a client may leave its answer
    unread, nor how many may connect.
    """

    # The listener's connections without a request under way, oldest first
    idle: dict[BoundedProtocol, None]
    turns: ReadTurns  # the listener's

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self.conn = BoundedConnection(h11.SERVER, MAX_HEAD_BYTES)

    _receiving: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _unread_data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            transport.abort()
            return
        self.idle[self] = None
        self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        self.idle.pop(self, None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads it when it is its turn; until then nothing more is received."""
        self._unset_keepalive_if_required()
        waits = bool(self._unread_data)
        self._unread_data += data
        if waits or not self.turns.take(self._who(), self._read):
            self.transport.pause_reading()

    def _who(self) -> Hashable:
        """The tenant that the connection's last request was from; before there was one, the address
        of the client.
        """
        tenant = self.scope["state"].get("tenant") if self.scope else None
        return tenant.name if tenant else (self.client[0] if self.client else None, None)

    def _read(self) -> None:
        """h11 takes a head of any size that comes at once; so it comes in pieces."""
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
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle.pop(self, None)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):  # more of a request is due
            begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
            if begun and self._receiving is None:
                self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)
        else:
            self._received()

    def on_response_complete(self) -> None:
        self._received()
        if not self.transport.is_closing():
            self.idle[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(SLOW_READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what h11 refuses, in the shape of all errors and with the status that
        h11 hints at.
        """
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(hint if hint in _WORDS else 400)

    def _make_room(self) -> bool:
        """Ends the connection that has been idle for longest. False if each has a request under
        way.
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
        else:  # nothing has come, or an answer has begun
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
