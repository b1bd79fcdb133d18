"""Reception of the messages of gRPC calls, with bounds on time, memory and number of fields."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from kvrelay.errors import DeadlineExceeded, InvalidArgument, KvRelayError
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.wire import status
from kvrelay.wire.field_bounds import Bounds, check_fields
from router.api.grpc.auth import OPEN_METHOD, caller
from router.api.grpc.receive_slots import ReceiveSlots
from router.runtime.loop_slices import LoopSlices

# Timeout for a message's arrival, including the wait for a slot.
RECEIVE_S = 20.0
# Size limit of a message to an open method.
MAX_PROBE_BYTES = 1024
# Caller of an open method. With tokens, a tenant's name is never empty.
_STRANGER = Tenant("")


class GrpcMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Reads the message of each method that takes a single message.

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

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replaces a single-message handler with a handler that reads the message within the
        bounds.
        """
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        kind = request_of(details.method)
        tenant = _STRANGER if details.method == OPEN_METHOD else caller.get(ANONYMOUS)

        async def read(_: object, context: grpc.aio.ServicerContext) -> None:
            try:
                message = await self._message(
                    context, tenant, kind, handler.request_deserializer, details.method
                )
            except KvRelayError as error:
                await status.abort(context, error)
            answer = await method(message, context)
            # None means that the method streams its answers by itself.
            if answer is not None:
                await context.write(answer)

        # On the wire, a call with one message is a stream of one message. The stream handler reads
        # the message only when a slot is free.
        return grpc.stream_stream_rpc_method_handler(
            read, response_serializer=handler.response_serializer
        )

    async def _message(
        self,
        context: grpc.aio.ServicerContext,
        tenant: Tenant,
        kind: Descriptor,
        deserialize: Callable[[bytes], Any],
        method: str,
    ) -> Any:
        """Reads and parses the call's message. Raises InvalidArgument, ResourceExhausted,
        DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(RECEIVE_S), self._receiving.slot(tenant):
                data = await context.read()
                if data is grpc.aio.EOF:
                    raise InvalidArgument(f"{method} requires one message, and the call has none")
                if method == OPEN_METHOD and len(data) > MAX_PROBE_BYTES:
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


def request_of(method: str) -> Descriptor:
    """Returns the request type of a registered method, given as /SERVICE/METHOD."""
    _, service, name = method.split("/")
    found: Descriptor = (
        descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
    )
    return found
