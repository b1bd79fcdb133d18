"""A client that speaks HTTP/2 by the frame, as gRPC's own clients cannot (RFC 9113)."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
_CANCEL = 8
# Stream numbers end here.
_LAST_STREAM = 2**31 - 1


class Http2Peer:
    """A connection to a gRPC server. Use `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1
        # Bytes that a stream may send at first.
        self.window = 65_535

    @classmethod
    async def connect(cls, target: str) -> Http2Peer:
        """target: HOST:PORT."""
        host, _, port = target.rpartition(":")
        peer = cls(*await asyncio.open_connection(host, int(port)))
        peer._writer.write(_PREFACE)
        peer._send(_SETTINGS, 0, 0)
        return peer

    def call(
        self, method: str, token: str | None = None, message: bytes = b"", length: int | None = None
    ) -> int:
        """Begins a call, and returns its stream's number. The message is announced with `length`
        bytes, and its rest never follows. Surrogates in `method` stand for single bytes, as in
        os.fsdecode.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "router",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        if token is not None:
            fields["authorization"] = f"Bearer {token}"
        # Literal fields that are not indexed, with lengths below 127 (RFC 7541, 6.2.2).
        block = b"".join(
            bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value
            for name, text in fields.items()
            for value in [text.encode(errors="surrogateescape")]
        )
        self._send(_HEADERS, _END_HEADERS, stream, block)
        head = b"\0" + (len(message) if length is None else length).to_bytes(4, "big")
        self._send(_DATA, _END_STREAM if length is None else 0, stream, head + message)
        return stream

    def reset(self, stream: int) -> None:
        """Cancels a call."""
        self._send(_RESET, 0, stream, _CANCEL.to_bytes(4, "big"))

    def ping(self) -> None:
        """Sends a ping. The server answers frames in their order."""
        self._send(_PING, 0, 0, bytes(8))

    async def credits(self, *, until_pong: bool = False) -> Counter[int]:
        """Returns the bytes by which the server has enlarged the windows of streams, from the next
        frame, or from all frames up to the answer to a ping.
        """
        credits: Counter[int] = Counter()
        while True:
            kind, flags, stream, payload = await self._receive()
            if kind == _WINDOW_UPDATE:
                credits[stream] += int.from_bytes(payload, "big")
            elif kind == _SETTINGS and not flags & _ACK:
                for at in range(0, len(payload), 6):
                    if int.from_bytes(payload[at : at + 2], "big") == _INITIAL_WINDOW_SIZE:
                        self.window = int.from_bytes(payload[at + 2 : at + 6], "big")
                self._send(_SETTINGS, _ACK, 0)
            elif kind == _PING and not flags & _ACK:
                self._send(_PING, _ACK, 0, payload)
            if not until_pong or (kind == _PING and flags & _ACK):
                return credits

    @property
    def socket(self) -> socket.socket:
        """The connection's socket."""
        found: socket.socket = self._writer.get_extra_info("socket")
        return found

    async def drain(self) -> None:
        """Waits until the kernel takes more bytes. Raises ConnectionError."""
        await self._writer.drain()

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
        self._writer.write(head + payload)

    async def _receive(self) -> tuple[int, int, int, bytes]:
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big") & _LAST_STREAM, payload
