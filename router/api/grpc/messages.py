"""Reception of the messages of gRPC calls, with bounds on time, memory and number of fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from kvrelay.errors import DeadlineExceeded, InvalidArgument, KvRelayError, ResourceExhausted
from kvrelay.tenants import ANONYMOUS
from kvrelay.wire import status
from kvrelay.wire.encoding.field_bounds import Bounds, check_fields
from router.api.grpc.auth import OPEN_METHOD, caller
from router.api.grpc.receive_slots import ProbeSlots, ReceiveSlots
from router.runtime.loop_slices import LoopSlices

# Timeout for a message's arrival, including the wait for a slot.
RECEIVE_S = 20.0
# Size limit of a message to the health or reflection service.
MAX_PROBE_BYTES = 1024
# Most messages that one call can send.
MAX_STREAMED = 256
# Reads a call's next message; None if the client sends no more.
Read = Callable[[grpc.aio.ServicerContext], Awaitable[Any]]


class GrpcMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Reads the messages of calls.

    By default gRPC has these problems:
    - It reads any number of messages before their handlers begin.
    - It waits for a message without a timeout.
    - It creates an object for each entry of a repeated field.
    - It answers a malformed message, such as text that is not UTF-8, with INTERNAL, which is for
      server faults.
    """

    def __init__(self, bounds: Bounds, slices: LoopSlices) -> None:
        """`bounds` has an entry for each repeated field of the methods' messages."""
        self._bounds = bounds
        self._slices = slices
        self._receiving = ReceiveSlots()
        self._probes = ProbeSlots()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replaces the method's handler with one that reads messages within the bounds."""
        handler = await continuation(details)
        if handler is None:
            return handler
        kind = request_of(details.method)

        async def read(context: grpc.aio.ServicerContext) -> Any:
            return await self._message(context, kind, handler.request_deserializer, details.method)

        async def respond(_: object, context: grpc.aio.ServicerContext) -> None:
            try:
                await (_exchange if handler.request_streaming else _answer)(handler, read, context)
            except KvRelayError as error:
                status.set_status(context, error)

        # On the wire, every call is a stream of messages. The stream handler reads a message only
        # when a slot is free.
        return grpc.stream_stream_rpc_method_handler(
            respond, response_serializer=handler.response_serializer
        )

    async def _message(
        self,
        context: grpc.aio.ServicerContext,
        kind: Descriptor,
        deserialize: Callable[[bytes], Any],
        method: str,
    ) -> Any:
        """Reads and parses the next message; None if the client sends no more. Raises
        InvalidArgument, ResourceExhausted, DeadlineExceeded.
        """
        tenant = caller.get(ANONYMOUS)
        slot = self._probes.slot() if method == OPEN_METHOD else self._receiving.slot(tenant)
        try:
            async with asyncio.timeout(RECEIVE_S), slot:
                data = await context.read()
                if data is grpc.aio.EOF:
                    return None
                if not method.startswith("/kvrelay.") and len(data) > MAX_PROBE_BYTES:
                    raise InvalidArgument(
                        f"the message has {len(data)} bytes; {method} allows at most "
                        f"{MAX_PROBE_BYTES}"
                    )
                await self._slices.run(tenant, check_fields(data, kind, self._bounds))
                return deserialize(data)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the message was not complete within {RECEIVE_S:g} s; send it faster"
            ) from None
        except DecodeError:
            text = f"the {len(data)} bytes are not a valid message of {method}"
            raise InvalidArgument(text) from None


async def _answer(handler: Any, read: Read, context: grpc.aio.ServicerContext) -> None:
    """Serves a call of a method that takes one message."""
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary
    answer = await method(await _required(read, context), context)
    # None means that the method streams its answers by itself.
    if answer is not None:
        await context.write(answer)


async def _required(read: Read, context: grpc.aio.ServicerContext) -> Any:
    """Returns the message of a call. Raises InvalidArgument without one."""
    if (message := await read(context)) is None:
        raise InvalidArgument("the method requires one message, and the call has none")
    return message


async def _exchange(handler: Any, read: Read, context: grpc.aio.ServicerContext) -> None:
    """Serves a call of a method that takes a stream of messages."""

    async def messages() -> AsyncIterator[Any]:
        for _ in range(MAX_STREAMED):
            if (message := await read(context)) is None:
                return
            yield message
        raise ResourceExhausted(f"a call may send {MAX_STREAMED} messages; begin another call")

    async for answer in handler.stream_stream(messages(), context):
        await context.write(answer)


def request_of(method: str) -> Descriptor:
    """Returns the request type of a registered method, given as /SERVICE/METHOD."""
    _, service, name = method.split("/")
    found: Descriptor = (
        descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
    )
    return found
