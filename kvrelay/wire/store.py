"""The service of a store of KV blocks: converts proto/kvrelay/v1/store.proto to and from frozen
dataclasses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.protocol_version import Protocol, ours
from kvrelay.types.kv_block import IDENTITY_BYTES, is_layout_hash, is_tenant_folder
from kvrelay.v1 import store_pb2 as pb
from kvrelay.v1 import transfer_pb2
from kvrelay.wire.encoding.fields import answered, to_message, to_value
from kvrelay.wire.encoding.kv_frame_bytes import frame_from_bytes, frame_to_bytes
from kvrelay.wire.kv_frame import Buffer, KvBlocks, KvOpen
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto

__all__ = [
    "FRAME_BYTES",
    "MAX_BLOCK_BYTES",
    "MAX_CALLS",
    "MAX_CALL_BLOCKS",
    "SERVICE_NAME",
    "StoreBlocks",
    "StoreStatus",
    "add_kv_store_servicer",
    "asker_of_status",
    "check_opening",
    "forgotten",
    "found_to_proto",
    "frames_of",
    "identities_in",
    "pb",
    "receipt_of",
    "records_of",
    "status_from_proto",
    "status_to_proto",
    "store_blocks_from_proto",
    "store_blocks_to_proto",
    "store_find",
    "store_forget",
    "store_get",
    "store_put",
    "store_status",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name
# Calls of one connection at a time.
MAX_CALLS = 64
# Blocks of one call.
MAX_CALL_BLOCKS = 1024
# Bytes of the largest block that a store takes.
MAX_BLOCK_BYTES = 64 * 2**20
# Most bytes of the records in one frame. A larger record goes on in the next frames.
FRAME_BYTES = 2**20

# In error messages.
_STORE = "the store"

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Names blocks of one layout to a store, by their identities; see `BlockKey`."""

    layout_hash: str
    identities: tuple[bytes, ...]
    # Of the worker.
    protocol: Protocol = field(default_factory=ours)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds, and what it has done since its start. Counts are in blocks."""

    # Bytes that blocks may take.
    size_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    # Tenants with blocks.
    tenants: int = 0
    stored: int = 0
    evicted: int = 0
    # Blocks that Get returned.
    found: int = 0
    # Of the store.
    protocol: Protocol = field(default_factory=ours)


def store_blocks_to_proto(blocks: StoreBlocks) -> pb.StoreBlocksRequest:
    """Converts names of blocks to their message."""
    return to_message(
        pb.StoreBlocksRequest,
        blocks,
        identities=b"".join(blocks.identities),
        protocol=protocol_to_proto(blocks.protocol),
    )


def store_blocks_from_proto(message: pb.StoreBlocksRequest) -> StoreBlocks:
    """Converts a message to names of blocks. Raises InvalidArgument."""
    protocol = protocol_from_proto(message.protocol)
    _check_layout(message.layout_hash)
    return StoreBlocks(message.layout_hash, identities_in(message.identities), protocol)


def identities_in(data: bytes) -> tuple[bytes, ...]:
    """Splits identities that follow each other. Raises InvalidArgument."""
    count, rest = divmod(len(data), IDENTITY_BYTES)
    if rest or not 0 < count <= MAX_CALL_BLOCKS:
        raise InvalidArgument(
            f"identities has {len(data)} bytes; allowed are {IDENTITY_BYTES} for each of 1 to "
            f"{MAX_CALL_BLOCKS} blocks",
            field="identities",
        )
    return tuple(data[at : at + IDENTITY_BYTES] for at in range(0, len(data), IDENTITY_BYTES))


def check_opening(opening: KvOpen) -> tuple[bytes, ...]:
    """Returns the identities of the blocks that a Put brings. Raises InvalidArgument for a frame
    that does not open a Put.
    """
    _check_layout(opening.layout_hash)
    if not is_tenant_folder(opening.tenant):
        raise InvalidArgument(
            f"tenant is {opening.tenant!r:.40}; allowed are 16 hexadecimal digits", field="tenant"
        )
    return identities_in(opening.identities)


def frames_of(records: Iterable[Sequence[Buffer]]) -> Iterator[bytes]:
    """Encodes records of blocks, each in pieces, as frames of up to FRAME_BYTES. A record that fits
    into a frame is in one. Each piece is copied once.
    """
    batch: list[memoryview] = []
    room = FRAME_BYTES
    for record in records:
        if sum(map(len, record)) > room and batch:
            yield _frame_of(batch)
            batch, room = [], FRAME_BYTES
        for piece in record:
            rest = memoryview(piece)
            while len(rest) > room:
                yield _frame_of([*batch, rest[:room]])
                rest, batch, room = rest[room:], [], FRAME_BYTES
            batch.append(rest)
            room -= len(rest)
    if batch:
        yield _frame_of(batch)


def _frame_of(pieces: Sequence[memoryview]) -> bytes:
    num_bytes = sum(map(len, pieces))
    return frame_to_bytes(KvBlocks(0, 0, 0, 0, 0, num_bytes, payload=tuple(pieces)))


def records_of(data: bytes) -> memoryview:
    """Returns the bytes of records in a frame, as a view. Raises InvalidArgument for a frame
    without any.
    """
    frame = frame_from_bytes(data)
    if not isinstance(frame, KvBlocks) or not frame.payload:
        raise InvalidArgument("the frame holds no blocks")
    return memoryview(frame.payload[0])


def _check_layout(layout: str) -> None:
    if not is_layout_hash(layout):
        raise InvalidArgument(
            f"layout_hash is {layout!r:.40}; allowed are 16 hexadecimal digits", field="layout_hash"
        )


def status_to_proto(status: StoreStatus) -> pb.GetStoreStatusResponse:
    """Converts the status of a store to its message."""
    return to_message(
        pb.GetStoreStatusResponse, status, protocol=protocol_to_proto(status.protocol)
    )


def status_from_proto(message: pb.GetStoreStatusResponse) -> StoreStatus:
    """Converts a message to the status of a store."""
    return to_value(StoreStatus, message, protocol=protocol_from_proto(message.protocol))


# The worker's end. All raise grpc.aio.AioRpcError, and FailedPrecondition for an answer that does
# not fit.


async def store_find(
    channel: grpc.aio.Channel, blocks: StoreBlocks, timeout_s: float
) -> tuple[bool, ...]:
    """Calls Find: whether the store has each of the blocks."""
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/Find",
        request_serializer=pb.StoreBlocksRequest.SerializeToString,
        response_deserializer=pb.FindBlocksResponse.FromString,
    )
    answer = answered(await call(store_blocks_to_proto(blocks), timeout=timeout_s), _STORE)
    ours().check(protocol_from_proto(answer.protocol), _STORE)
    if len(answer.found) != len(blocks.identities):
        raise FailedPrecondition(
            f"the store answered for {len(answer.found)} of {len(blocks.identities)} blocks"
        )
    return tuple(map(bool, answer.found))


async def store_get(
    channel: grpc.aio.Channel, blocks: StoreBlocks, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """Calls Get: the frames of the leading blocks that the store has, as bytes."""
    call = channel.unary_stream(
        f"/{SERVICE_NAME}/Get", request_serializer=pb.StoreBlocksRequest.SerializeToString
    )(store_blocks_to_proto(blocks), timeout=timeout_s)
    try:
        async for frame in call:
            yield frame
    finally:
        # Ends the call if the caller has enough.
        call.cancel()


async def store_put(
    channel: grpc.aio.Channel, frames: AsyncIterator[bytes], timeout_s: float
) -> int:
    """Calls Put with frames as bytes. Returns the number of blocks that the store took."""
    call = channel.stream_unary(
        f"/{SERVICE_NAME}/Put", response_deserializer=transfer_pb2.KvReceipt.FromString
    )
    return int(answered(await call(frames, timeout=timeout_s), _STORE).blocks)


async def store_forget(channel: grpc.aio.Channel, blocks: StoreBlocks, timeout_s: float) -> None:
    """Calls Forget."""
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/Forget",
        request_serializer=pb.StoreBlocksRequest.SerializeToString,
        response_deserializer=pb.ForgetBlocksResponse.FromString,
    )
    answered(await call(store_blocks_to_proto(blocks), timeout=timeout_s), _STORE)


async def store_status(channel: grpc.aio.Channel, timeout_s: float) -> StoreStatus:
    """Calls GetStoreStatus. Raises FailedPrecondition for a store of another version."""
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/GetStoreStatus",
        request_serializer=pb.GetStoreStatusRequest.SerializeToString,
        response_deserializer=pb.GetStoreStatusResponse.FromString,
    )
    request = pb.GetStoreStatusRequest(protocol=protocol_to_proto(ours()))
    status = status_from_proto(answered(await call(request, timeout=timeout_s), _STORE))
    ours().check(status.protocol, _STORE)
    return status


# The store's end


def found_to_proto(found: Sequence[bool]) -> pb.FindBlocksResponse:
    """Converts the answer of Find to its message."""
    return pb.FindBlocksResponse(found=bytes(found), protocol=protocol_to_proto(ours()))


def receipt_of(blocks: int, num_bytes: int) -> transfer_pb2.KvReceipt:
    """Returns the answer of Put."""
    return transfer_pb2.KvReceipt(blocks=blocks, bytes=num_bytes)


def forgotten() -> pb.ForgetBlocksResponse:
    """Returns the answer of Forget."""
    return pb.ForgetBlocksResponse()


def asker_of_status(message: pb.GetStoreStatusRequest) -> Protocol:
    """Returns the protocol of the peer that asks for the status."""
    return protocol_from_proto(message.protocol)


def add_kv_store_servicer(
    find: Method, get: Method, put: Method, forget: Method, status: Method, server: grpc.aio.Server
) -> None:
    """Registers KvStoreService on the server. `put` receives frames as bytes, and `get` yields
    frames as bytes.
    """
    named = pb.StoreBlocksRequest.FromString
    methods = {
        "Find": grpc.unary_unary_rpc_method_handler(
            find, named, pb.FindBlocksResponse.SerializeToString
        ),
        "Get": grpc.unary_stream_rpc_method_handler(get, named),
        "Put": grpc.stream_unary_rpc_method_handler(
            put, response_serializer=transfer_pb2.KvReceipt.SerializeToString
        ),
        "Forget": grpc.unary_unary_rpc_method_handler(
            forget, named, pb.ForgetBlocksResponse.SerializeToString
        ),
        "GetStoreStatus": grpc.unary_unary_rpc_method_handler(
            status,
            pb.GetStoreStatusRequest.FromString,
            pb.GetStoreStatusResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
