"""gRPC messages that cannot be read, such as text that is not UTF-8: the caller's mistake, and told as such."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvrelay.errors import InvalidArgument
from kvrelay.wire import status


class GrpcMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Reads the message of each method that takes one. By itself gRPC answers INTERNAL, as to a mistake of ours."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        streams = handler.response_streaming
        method = handler.unary_stream if streams else handler.unary_unary

        async def read(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                message = handler.request_deserializer(data)
            except DecodeError:
                text = f"the {len(data)} bytes are no message of {details.method}, or text in it is not UTF-8"
                await status.abort(context, InvalidArgument(text))
            return await method(message, context)

        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return make(read, response_serializer=handler.response_serializer)
