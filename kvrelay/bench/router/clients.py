"""Minimal clients, so that the measured cost is the router's."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from kvrelay.client.base_client import channel_options
from kvrelay.errors import Unavailable
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceStub,
    SamplingOptions,
    request_to_proto,
)


@dataclass(slots=True)
class Received:
    """Totals over all streams. Latencies are in seconds, from when a worker emits a token to when a
    client receives it.
    """

    requests: int = 0
    tokens: int = 0
    messages: int = 0
    latencies: list[float] = field(default_factory=list)


class Client(Protocol):
    """Runs one request to its end and counts what arrives. Raises Unavailable for an incomplete
    answer.
    """

    async def run(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, received: Received
    ) -> None:
        """Runs one request and adds its counts to `received`. Raises Unavailable for an incomplete
        answer.
        """
        ...

    async def close(self) -> None:
        """Closes the connection."""
        ...


class GrpcClient:
    """A gRPC client with a channel of its own."""

    def __init__(self, target: str, said: defaultdict[str, list[float]]) -> None:
        self._channel = grpc.aio.insecure_channel(
            target, options=(*channel_options(target), ("grpc.use_local_subchannel_pool", 1))
        )
        self._stub = InferenceServiceStub(self._channel)
        self._said = said

    async def run(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, received: Received
    ) -> None:
        """Runs one request and adds its counts to `received`. Raises Unavailable for an incomplete
        answer.
        """
        sampling = SamplingOptions(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        request = GenerateRequest(request_id=request_id, token_ids=prompt, sampling=sampling)
        got = 0
        async for message in self._stub.Generate(request_to_proto(request)):
            now = time.perf_counter()
            count = len(message.token_ids)
            received.messages += 1
            received.tokens += count
            received.latencies += [now - at for at in self._said[request_id][got : got + count]]
            got += count
        received.requests += 1
        del self._said[request_id]
        if got != max_tokens:
            raise Unavailable(f"{request_id} got {got} of {max_tokens} tokens")

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()


class HttpClient:
    """One connection for one request at a time. The client does not parse the events; it counts
    `word`, the text of each token.
    """

    def __init__(self, address: str, word: bytes, said: defaultdict[str, list[float]]) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._word = word
        self._said = said
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, received: Received
    ) -> None:
        """Runs one request and adds its counts to `received`. Raises Unavailable if the router
        rejects the request or the answer is incomplete.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        body = self._body(request_id, prompt)
        data = json.dumps(body | {"max_tokens": max_tokens, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await reader.readuntil(b"\r\n\r\n")
        if not status.startswith(b"HTTP/1.1 200 "):
            raise Unavailable(f"{request_id}: {status.decode(errors='replace').splitlines()[0]}")
        got = 0
        # The last bytes, which the next piece may complete.
        tail = b""
        while b"0\r\n\r\n" not in tail:
            piece = await reader.read(2**16)
            if not piece:
                raise Unavailable(
                    f"{request_id}: the connection was closed before the end of the answer"
                )
            now = time.perf_counter()
            data = tail[1 - len(self._word) :] + piece
            count = data.count(self._word)
            received.latencies += [now - at for at in self._said[request_id][got : got + count]]
            received.messages += piece.count(b"data: {")
            received.tokens += count
            got += count
            tail = data[-32:]
        received.requests += 1
        del self._said[request_id]
        if got != max_tokens:
            raise Unavailable(f"{request_id} got {got} of {max_tokens} tokens")

    async def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()
            await writer.wait_closed()

    def _body(self, request_id: str, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "request_id": request_id,
        }


class PeerClient(HttpClient):
    """A client of a router that passes text on to an HttpWorker."""

    def _body(self, request_id: str, prompt: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": "demo",
            "prompt": " ".join(map(str, prompt)),
            "temperature": 0,
            "user": request_id,
        }
