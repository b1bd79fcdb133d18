"""A minimal HTTP/1.1 client for load tests: one request, and the events of its answer as they
arrive.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvrelay.client.hints import ADDRESSES
from kvrelay.errors import Code, Internal, KvRelayError, Unavailable, error_for


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The head of an answer, and its body as a stream."""

    status: int
    # Names in lower case.
    headers: dict[str, str]
    # In pieces, as they arrive.
    body: AsyncIterator[bytes]

    async def json(self) -> dict[str, Any]:
        """Reads the whole body as a JSON object. Raises the typed error for a status other than
        200, and Internal for a body that is not a JSON object.
        """
        found = _object(b"".join([piece async for piece in self.body]))
        if self.status != 200:
            raise _error(self.status, found)
        return found

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the JSON objects of a text/event-stream up to [DONE]. Raises the typed error for
        an error status or event, Internal for an event that is not a JSON object, and Unavailable
        for a stream without [DONE].
        """
        if self.status != 200:
            await self.json()
        buffer = b""
        async for piece in self.body:
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    event = _object(data)
                    if event.get("error") is not None:
                        raise _error(500, event)
                    yield event
        raise Unavailable("the stream ended before [DONE]")


async def request(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> HttpResponse:
    """Sends one request on a new connection. Raises Unavailable if the peer closes the connection,
    and Internal if the answer is not HTTP.
    """
    payload = b"" if body is None else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    await writer.drain()
    protocol, _, rest = (await _line(reader)).partition(" ")
    status = rest[:3]
    if not protocol.startswith("HTTP/1.") or not status.isdecimal():
        raise Internal(f"{host} did not answer with HTTP")
    received = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        received[name.lower()] = value.strip()
    chunked = received.get("transfer-encoding", "").lower() == "chunked"
    return HttpResponse(int(status), received, _chunks(reader) if chunked else _rest(reader))


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise Internal("a line of the answer is too long") from error
    if not line.endswith(b"\n"):
        raise Unavailable(f"the connection was closed before the answer; {ADDRESSES['http']}")
    return line.decode("latin-1").rstrip("\r\n")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    try:
        while size := int((await _line(reader)).partition(";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    except (ValueError, asyncio.IncompleteReadError) as error:
        raise Unavailable(f"the connection broke during the answer: {error}") from error


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(2**16):
        yield piece


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        shown = text[:40].decode(errors="replace")
        raise Internal(f"the answer is not a JSON object, as OpenAI's API has it: {shown!r}")
    return found


def _refuse(constant: str) -> None:
    """Rejects NaN and Infinity, which Python accepts but JSON does not have."""
    raise ValueError(constant)


def _error(status: int, body: dict[str, Any]) -> KvRelayError:
    """Builds the error of an OpenAI error body: by its type if kvrelay has that type, else by the
    HTTP status.
    """
    detail = body.get("error")
    detail = detail if isinstance(detail, dict) else {}
    by_status = next((code for code in Code if code.http_status == status), Code.INTERNAL)
    code = next((code for code in Code if code.openai_type == detail.get("type")), by_status)
    return error_for(code, str(detail.get("message") or f"HTTP {status}"))
