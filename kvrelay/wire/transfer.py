"""The transfer of KV: the service of proto/kvrelay/v1/transfer.proto and its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from kvrelay.v1 import transfer_pb2 as pb
from kvrelay.wire.encoding.fields import answered, to_message, to_value
from kvrelay.wire.encoding.kv_frame_bytes import frame_from_bytes, frame_to_bytes
from kvrelay.wire.fetch_request import (
    FetchRequest,
    fetch_request_from_proto,
    fetch_request_to_proto,
)
from kvrelay.wire.kv_frame import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    RemoteArena,
    SharedSegment,
    VllmBlocks,
    commit_digest,
)

__all__ = [
    "SERVICE_NAME",
    "FetchRequest",
    "Frame",
    "KvBlocks",
    "KvCommit",
    "KvOpen",
    "KvReceipt",
    "RemoteArena",
    "SharedSegment",
    "VllmBlocks",
    "add_kv_transfer_servicer",
    "commit_digest",
    "fetch_request_from_proto",
    "frame_from_bytes",
    "frame_to_bytes",
    "kv_fetch",
    "kv_push",
    "pb",
    "receipt_from_proto",
    "receipt_to_proto",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["KvTransferService"].full_name

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class KvReceipt:
    """The receiver's confirmation: the number of blocks received, and their bytes."""

    blocks: int
    bytes: int


def receipt_to_proto(receipt: KvReceipt) -> pb.KvReceipt:
    """Converts a receipt to its message."""
    return to_message(pb.KvReceipt, receipt)


def receipt_from_proto(message: pb.KvReceipt | None) -> KvReceipt:
    """Converts a message to a receipt. Raises FailedPrecondition for None, see `answered`."""
    return to_value(KvReceipt, answered(message, "the receiver"))


def kv_push(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryMultiCallable:
    """Returns the stub of KvTransferService.Push. It takes frames encoded by `frame_to_bytes`."""
    return channel.stream_unary(
        f"/{SERVICE_NAME}/Push", response_deserializer=pb.KvReceipt.FromString
    )


async def kv_fetch(channel: grpc.aio.Channel, request: FetchRequest, timeout_s: float) -> int:
    """Calls KvTransferService.Fetch. Returns the number of leading blocks that were pushed within
    `timeout_s` seconds.

    Raises grpc.aio.AioRpcError, and FailedPrecondition for an answer that cannot be read.
    """
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/Fetch",
        request_serializer=pb.FetchRequest.SerializeToString,
        response_deserializer=pb.FetchResponse.FromString,
    )
    response = await call(fetch_request_to_proto(request), timeout=timeout_s)
    return int(answered(response, "the worker").blocks)


def add_kv_transfer_servicer(push: Method, fetch: Method | None, server: grpc.aio.Server) -> None:
    """Registers KvTransferService on the server. `push` receives frames as bytes. None for `fetch`
    leaves out Fetch.
    """
    methods = {
        "Push": grpc.stream_unary_rpc_method_handler(
            push, response_serializer=pb.KvReceipt.SerializeToString
        ),
    }
    if fetch is not None:
        methods["Fetch"] = grpc.unary_unary_rpc_method_handler(
            fetch,
            request_deserializer=pb.FetchRequest.FromString,
            response_serializer=pb.FetchResponse.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
