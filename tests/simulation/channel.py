"""The caller's part of grpc.aio as kvrelay uses it, over a simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import Any

import grpc
from simulation.network import Connection, Network, Packet
from simulation.virtual_loop import current_process


class Channel:
    """grpc.aio.Channel: connects when it is used, and again when the connection is gone."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._connection: Connection | None = None
        self._closed = False

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        if self._connection is not None:
            if grace:
                waiting = [one.over for one in self._connection.calls]
                if waiting:
                    await asyncio.wait(waiting, timeout=grace)
            self._connection.break_side(self._connection.client, "Channel closed")

    def connection(self) -> Connection | None:
        if self._connection is None or not self._connection.usable:
            server = self._network.servers.get(self._address)
            self._connection = (
                None if server is None else Connection(self._network, current_process(), server)
            )
        return self._connection

    def _method(
        self, kind: str, path: str, serialize: Any, deserialize: Any
    ) -> Callable[..., ClientCall]:
        def begin(
            first: Any = None, *, timeout: float | None = None, metadata: Any = None, **_: Any
        ) -> ClientCall:
            return ClientCall(
                self._network,
                self,
                kind,
                path,
                serialize,
                deserialize,
                first,
                timeout,
                metadata or (),
            )

        return begin

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., ClientCall]:
        return self._method("unary_unary", path, request_serializer, response_deserializer)

    def stream_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., ClientCall]:
        return self._method("stream_unary", path, request_serializer, response_deserializer)

    def stream_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., ClientCall]:
        return self._method("stream_stream", path, request_serializer, response_deserializer)


class ClientCall:
    """The caller's end."""

    def __init__(
        self,
        network: Network,
        channel: Channel,
        kind: str,
        path: str,
        serialize: Any,
        deserialize: Any,
        first: Any,
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self.method = path.rpartition("/")[2]
        self.path = path
        self.metadata = metadata
        self.timeout = timeout
        self.number = network.calls = network.calls + 1
        loop = network.loop
        self.over: asyncio.Future[None] = loop.create_future()
        self._headers: asyncio.Future[None] = loop.create_future()
        self._initial: Any = ()
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._incoming: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._serialize = serialize or (lambda one: one)
        self._deserialize = deserialize or (lambda one: one)
        self._cancelled = False
        self._process = current_process()
        self._writer: asyncio.Task[None] | None = None
        self._connection = channel.connection()
        if self._connection is None:
            self._process.soon(
                network.latency(self._process.name, "?"), self.broken, "failed to connect"
            )
            return
        self._connection.calls.append(self)
        self._send("open")
        if kind.startswith("unary"):
            self._send("message", self._serialize(first))
            self._send("half_close")
        elif first is not None:
            self._writer = self._process.spawn(self._write_all(first))
        if timeout is not None:
            self._process.soon(timeout, self._expire)

    async def _write_all(self, requests: AsyncIterable[Any]) -> None:
        async for request in requests:
            if self._status is not None:
                return
            self._send("message", self._serialize(request))
        self._send("half_close")

    def _send(self, kind: str, data: Any = None) -> None:
        if self._connection is not None:
            self._connection.send(Packet(self, True, kind, data))

    def _expire(self) -> None:
        if self._status is None:
            self._send("cancel")
            self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    # From the network

    def arrived(self, packet: Packet) -> None:
        if self._status is not None:
            return
        match packet.kind:
            case "headers":
                self._initial = packet.data
                settle(self._headers)
            case "message":
                settle(self._headers)
                self._incoming.append(packet.data)
                self._wake()
            case "status":
                self._finish(*packet.data)

    def broken(self, reason: str) -> None:
        self._finish(grpc.StatusCode.UNAVAILABLE, reason)

    def _finish(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        if self._status is not None:
            return
        self._status = code, details, trailing
        if self._connection is not None and self in self._connection.calls:
            self._connection.calls.remove(self)
        if self._writer is not None:
            self._writer.cancel()
        settle(self._headers)
        settle(self.over)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            settle(self._reader)

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        code, details, trailing = self._status
        return grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details
        )

    # For the caller

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled = True
        self._send("cancel")
        self._finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._status is not None

    async def read(self) -> Any:
        while not self._incoming:
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                if self._cancelled:
                    raise asyncio.CancelledError
                raise self._error()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._deserialize(self._incoming.popleft())

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._send("message", self._serialize(message))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        if self._status is None:
            self._send("half_close")

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await asyncio.shield(self._headers)
        return grpc.aio.Metadata(*self._initial)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await asyncio.shield(self.over)
        assert self._status is not None
        return grpc.aio.Metadata(*self._status[2])

    async def code(self) -> grpc.StatusCode:
        await asyncio.shield(self.over)
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        await asyncio.shield(self.over)
        assert self._status is not None
        return self._status[1]

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            await asyncio.shield(self.over)
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self._status is not None
        if self._status[0] is grpc.StatusCode.OK:
            return self._deserialize(self._incoming[0])
        if self._cancelled:
            raise asyncio.CancelledError
        raise self._error()


def settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
