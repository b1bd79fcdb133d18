"""The server's part of grpc.aio as kvrelay uses it, over a simulated network."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import grpc
from simulation.channel import ClientCall, settle
from simulation.network import Connection, Network, Packet
from simulation.virtual_loop import current_process

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Server:
    """grpc.aio.Server."""

    def __init__(self, network: Network) -> None:
        self.process = current_process()
        self._network = network
        self._handlers: list[Any] = []
        self._addresses: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        pass  # the same again

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or self._network.free_port()
        self._network.promise(number)
        self._addresses.append(f"{host}:{number}")
        return number

    async def start(self) -> None:
        for address in self._addresses:
            self._network.servers[address] = self
            self._network.keep_promise(int(address.rpartition(":")[2]))

    async def stop(self, grace: float | None = None) -> None:
        for address in self._addresses:
            self._network.servers.pop(address, None)
        if grace:
            await asyncio.sleep(grace)
        for connection in list(self._network.connections):
            if connection.listener is self:
                connection.break_side(self.process, "Server stopped")

    def arrived(self, connection: Connection, packet: Packet) -> None:
        if packet.kind == "open":
            if packet.call not in connection.server_calls:
                connection.server_calls[packet.call] = ServerCall(
                    self._network, connection, packet.call, self
                )
        elif packet.call in connection.server_calls:
            connection.server_calls[packet.call].arrived(packet)

    def find(self, path: str) -> Any:
        details = SimpleNamespace(method=path, invocation_metadata=())
        found = (handler.service(details) for handler in self._handlers)
        return next((one for one in found if one is not None), None)


class ServerCall:
    """The server's end: the handler's task, its iterator of requests and its context in one."""

    def __init__(
        self, network: Network, connection: Connection, call: ClientCall, server: Server
    ) -> None:
        self._network = network
        self._connection = connection
        self._call = call
        self._incoming: deque[bytes | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._said_headers = False
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._handler = server.find(call.path)
        self._deserialize = (self._handler and self._handler.request_deserializer) or (
            lambda one: one
        )
        self._serialize = (self._handler and self._handler.response_serializer) or (lambda one: one)
        self._task = server.process.spawn(self._run())

    def arrived(self, packet: Packet) -> None:
        match packet.kind:
            case "message":
                self._incoming.append(packet.data)
            case "half_close":
                self._incoming.append(None)
            case "cancel":
                self.cancel()
        if self._reader is not None:
            settle(self._reader)

    def cancel(self) -> None:
        self._over = True
        self._connection.server_calls.pop(self._call, None)
        self._task.cancel()
        if self._reader is not None:
            settle(self._reader)

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            while not self._incoming:
                if self._over:
                    raise grpc.aio.UsageError("RPC is finished.")  # type: ignore[attr-defined]
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            message = self._incoming.popleft()
            if message is None:
                return
            yield self._deserialize(message)

    async def _run(self) -> None:
        status: tuple[grpc.StatusCode, str, Any] = (grpc.StatusCode.OK, "", ())
        try:
            if self._handler is None:
                status = grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ()
            else:
                await self._handle()
        except grpc.aio.AbortError:
            assert self._status is not None
            status = self._status
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED, "", ()
            raise
        except Exception as error:  # noqa: BLE001  as gRPC does; it is judged
            self._network.unexpected.append(f"{self._call.path}: {error!r}")
            status = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ()
        finally:
            self._over = True
            if self._reader is not None:
                settle(self._reader)
            self._connection.server_calls.pop(self._call, None)
            self._send("status", status)

    async def _handle(self) -> None:
        handler = self._handler
        function = next(
            getattr(handler, kind) for kind in _KINDS if getattr(handler, kind) is not None
        )
        requests = self._requests()
        given = requests if handler.request_streaming else await anext(requests)
        if inspect.isasyncgenfunction(function):
            async for response in function(given, self):
                await self.write(response)
        else:
            response = await function(given, self)
            if not handler.response_streaming:
                await self.write(response)

    def _send(self, kind: str, data: Any = None) -> None:
        self._connection.send(Packet(self._call, False, kind, data))

    # grpc.aio.ServicerContext

    async def write(self, response: Any) -> None:
        if self._over:
            raise grpc.aio.UsageError("RPC is finished.")  # type: ignore[attr-defined]
        self._send("message", self._serialize(response))

    async def send_initial_metadata(self, metadata: object) -> None:
        self._send("headers", metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        self._status = code, details, trailing_metadata
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    def time_remaining(self) -> float | None:
        return self._call.timeout

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self._call.number}"
