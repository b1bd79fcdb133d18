"""The messages of a hand-off: converts proto/kvrelay/v1/transfer.proto to and from frozen
dataclasses.

Frames are encoded and decoded as bytes, without the generated code. So a payload of several MiB is
copied once when it leaves an arena, and not at all when it arrives. The bytes on the wire are those
of the message in the .proto file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import xxhash
from google.protobuf.message import DecodeError

from kvrelay.errors import FailedPrecondition
from kvrelay.messages import HandoffTarget
from kvrelay.protocol import Protocol, ours
from kvrelay.types import KvLayout, LayerKv
from kvrelay.v1 import transfer_pb2 as pb
from kvrelay.wire import varint
from kvrelay.wire.protocol import protocol_from_proto, protocol_to_proto
from kvrelay.wire.worker import target_from_proto, target_to_proto

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
    "add_kv_transfer_servicer",
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

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """The sender's arena as an anonymous memory file: `kvrelay-NONCE` behind /proc/PID/fd/FD,
    `size` bytes.
    """

    pid: int
    fd: int
    size: int
    nonce: int


@dataclass(frozen=True, slots=True)
class RemoteArena:
    """The sender's arena of `size` bytes, for a receiver that reads it without the sender's help.

    nixl: `access` is the metadata of the sender's agent, `start` an address in the sender's
    process. cuda_ipc: `access` is the handle of the allocation, `start` an offset from the
    beginning of the allocation. `device`: the sender's GPU, or -1.
    """

    access: bytes
    start: int
    size: int
    device: int = -1


@dataclass(frozen=True, slots=True)
class KvOpen:
    """Opens a push: names the lease, describes the sender's blocks, and says how their bytes
    travel.
    """

    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    # For memory and shm.
    segment: SharedSegment | None = None
    # For gloo and nccl: HOST:PORT/NAME of the sender's store and of the group in it.
    rendezvous: str = ""
    model_id: str = ""
    # Layout of the sender's arena; None: the same as the receiver's.
    layout: KvLayout | None = None
    # For nixl and cuda_ipc.
    arena: RemoteArena | None = None
    # The algorithm of the block digests.
    digest: str = "xxh3"
    # Worker id.
    sender: str = ""
    # The capability from the target.
    capability: str = field(default="", repr=False)
    # Protocol of the sender.
    protocol: Protocol = field(default_factory=ours)


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Some layers of the blocks first to first + count - 1 of the sequence, in the sender's block
    numbering.
    """

    # 0, 1, 2, ... within the push.
    sequence: int
    first: int
    count: int
    first_layer: int
    num_layers: int
    num_bytes: int
    # One digest per block, over the bytes of these layers in plan order. Empty if digests are off.
    digests: tuple[int, ...] = ()
    # For grpc: the bytes, in pieces.
    payload: tuple[Buffer, ...] = ()
    # Block numbers in the sender's arena, if the receiver reads the blocks from there.
    source_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvCommit:
    """Ends a push. `digest` is the result of `commit_digest`."""

    frames: int
    digest: int
    first_token: int
    # Tokens whose KV was sent or is cached.
    num_tokens: int


def commit_digest(blocks: xxhash.xxh3_64, first_token: int, num_tokens: int) -> int:
    """Returns XXH3-64 over the digests of all blocks, which `blocks` already contains, and the two
    numbers. Each number is 8 bytes, little endian. The first token is included because the answer
    continues from it, so it must be as correct as the KV.
    """
    whole = blocks.copy()
    for number in (first_token, num_tokens):
        whole.update(number.to_bytes(8, "little", signed=True))
    return whole.intdigest()


@dataclass(frozen=True, slots=True)
class KvReceipt:
    """The receiver's confirmation: the number of blocks received, and their bytes."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Requests the KV of these tokens. The KV is pushed to the lease of the requesting worker.

    Tokens whose KV is cached at the target are not pushed. A worker of release 0.1, which
    identifies blocks by 64-bit hashes, sends no tokens.
    """

    request_id: str
    attempt: int
    # From the start of the sequence to the end of the requested KV.
    token_ids: tuple[int, ...]
    target: HandoffTarget
    # Tokens that the capability covers, from the start of the request.
    granted_tokens: int
    capability: str = field(repr=False)
    # Salt of the sequence.
    salt: str = field(default="", repr=False)
    # Protocol of the requesting worker.
    protocol: Protocol = field(default_factory=ours)


Frame = KvOpen | KvBlocks | KvCommit


def frame_to_bytes(frame: Frame) -> bytes:
    """Encodes a frame. A payload is copied once."""
    match frame:
        case KvOpen():
            return pb.KvFrame(open=_open_to_proto(frame)).SerializeToString()
        case KvBlocks():
            return _blocks_to_bytes(frame)
        case KvCommit():
            commit = pb.KvCommit(
                frames=frame.frames,
                digest=frame.digest,
                first_token=frame.first_token,
                num_tokens=frame.num_tokens,
            )
            return pb.KvFrame(commit=commit).SerializeToString()


def frame_from_bytes(data: bytes) -> Frame:
    """Decodes a frame; its payload is a view of `data`. Raises FailedPrecondition for bytes that
    are not a frame known to this version.

    A length in the data cannot cause an allocation larger than the data itself.
    """
    try:
        if data[:1] == _BLOCKS_TAG:
            return _blocks_from_bytes(data)
        if len(data) > _MAX_BYTES_WITHOUT_KV:
            raise FailedPrecondition(f"a frame without KV has {len(data)} bytes, which is too long")
        message = pb.KvFrame.FromString(data)
    except (DecodeError, varint.Malformed) as error:
        raise FailedPrecondition(
            f"the {len(data)} bytes are not a hand-off frame: {error}"
        ) from None
    match message.WhichOneof("frame"):
        case "open":
            return _open_from_proto(message.open)
        case "commit":
            commit = message.commit
            return KvCommit(commit.frames, commit.digest, commit.first_token, commit.num_tokens)
        case unknown:
            raise FailedPrecondition(f"hand-off frame {unknown!r} is unknown to this version")


# Limited, because empty layers in an open frame take many times their size in memory.
_MAX_BYTES_WITHOUT_KV = 2**16
_BLOCKS_TAG = varint.tag(pb.KvFrame.BLOCKS_FIELD_NUMBER)
_PAYLOAD_TAG = varint.tag(pb.KvBlocks.PAYLOAD_FIELD_NUMBER)


def _blocks_to_bytes(frame: KvBlocks) -> bytes:
    head = pb.KvBlocks(
        sequence=frame.sequence,
        first=frame.first,
        count=frame.count,
        first_layer=frame.first_layer,
        num_layers=frame.num_layers,
        num_bytes=frame.num_bytes,
        digests=frame.digests,
        source_blocks=frame.source_blocks,
    ).SerializeToString()
    size = sum(len(piece) for piece in frame.payload)
    if size:
        head += _PAYLOAD_TAG + varint.encoded(size)
    return b"".join((_BLOCKS_TAG, varint.encoded(len(head) + size), head, *frame.payload))


def _blocks_from_bytes(data: bytes) -> KvBlocks:
    """Decodes a blocks frame. The payload is the last field, so the other fields can be parsed
    without it.
    """
    view = memoryview(data)
    length, start = varint.decode(view, len(_BLOCKS_TAG))
    whole = start + length
    if whole > len(data):
        raise varint.Malformed(
            f"blocks of {length} bytes exceed the remaining {len(data) - start} bytes of the "
            "message"
        )
    for number, *_ in varint.fields(view, whole):
        if number == 0 or number in pb.KvFrame.DESCRIPTOR.fields_by_number:
            raise varint.Malformed(f"field {number} follows the blocks")
    end = whole
    payload = view[:0]
    for number, at, first, last in varint.fields(view[:whole], start):
        if number == pb.KvBlocks.PAYLOAD_FIELD_NUMBER:
            if last != whole:
                raise varint.Malformed("data follows the payload")
            end, payload = at, view[first:last]
    head = pb.KvBlocks.FromString(data[start:end])
    return KvBlocks(
        sequence=head.sequence,
        first=head.first,
        count=head.count,
        first_layer=head.first_layer,
        num_layers=head.num_layers,
        num_bytes=head.num_bytes,
        digests=tuple(head.digests),
        payload=(payload,) if payload else (),
        source_blocks=tuple(head.source_blocks),
    )


def _open_to_proto(frame: KvOpen) -> pb.KvOpen:
    segment = None
    if frame.segment is not None:
        shared = frame.segment
        segment = pb.SharedSegment(
            pid=shared.pid, fd=shared.fd, size=shared.size, nonce=shared.nonce
        )
    return pb.KvOpen(
        request_id=frame.request_id,
        attempt=frame.attempt,
        lease_id=frame.lease_id,
        epoch=frame.epoch,
        generation=frame.generation,
        layout_hash=frame.layout_hash,
        transport=frame.transport,
        segment=segment,
        rendezvous=frame.rendezvous,
        model_id=frame.model_id,
        layout=None if frame.layout is None else _layout_to_proto(frame.layout),
        arena=None if frame.arena is None else _arena_to_proto(frame.arena),
        digest=frame.digest,
        sender=frame.sender,
        capability=frame.capability,
        protocol=protocol_to_proto(frame.protocol),
    )


def _open_from_proto(message: pb.KvOpen) -> KvOpen:
    segment = None
    if message.HasField("segment"):
        shared = message.segment
        segment = SharedSegment(shared.pid, shared.fd, shared.size, shared.nonce)
    return KvOpen(
        request_id=message.request_id,
        attempt=message.attempt,
        lease_id=message.lease_id,
        epoch=message.epoch,
        generation=message.generation,
        layout_hash=message.layout_hash,
        transport=message.transport,
        segment=segment,
        rendezvous=message.rendezvous,
        model_id=message.model_id,
        layout=_layout_from_proto(message.layout) if message.HasField("layout") else None,
        arena=_arena_from_proto(message.arena) if message.HasField("arena") else None,
        digest=message.digest or "xxh3",
        sender=message.sender,
        capability=message.capability,
        protocol=protocol_from_proto(message.protocol),
    )


def _arena_to_proto(arena: RemoteArena) -> pb.RemoteArena:
    return pb.RemoteArena(
        access=arena.access, start=arena.start, size=arena.size, device=arena.device
    )


def _arena_from_proto(message: pb.RemoteArena) -> RemoteArena:
    return RemoteArena(message.access, message.start, message.size, message.device)


def _layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    layers = [
        pb.LayerKv(kv_heads=one.kv_heads, k_dim=one.k_dim, v_dim=one.v_dim) for one in layout.layers
    ]
    return pb.KvLayout(
        layers=layers,
        block_size=layout.block_size,
        dtype=layout.dtype,
        word=layout.word or 0,
        ranks=layout.ranks,
    )


def _layout_from_proto(message: pb.KvLayout) -> KvLayout:
    layers = tuple(LayerKv(one.kv_heads, one.k_dim, one.v_dim) for one in message.layers)
    return KvLayout(
        layers, message.block_size, message.dtype, message.word or None, message.ranks or 1
    )


def receipt_to_proto(receipt: KvReceipt) -> pb.KvReceipt:
    """Converts a receipt to its message."""
    return pb.KvReceipt(blocks=receipt.blocks, bytes=receipt.bytes)


def receipt_from_proto(message: pb.KvReceipt) -> KvReceipt:
    """Converts a message to a receipt."""
    return KvReceipt(message.blocks, message.bytes)


def kv_push(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryMultiCallable:
    """Returns the stub of KvTransferService.Push. It takes frames encoded by `frame_to_bytes`."""
    return channel.stream_unary(
        f"/{SERVICE_NAME}/Push", response_deserializer=pb.KvReceipt.FromString
    )


async def kv_fetch(channel: grpc.aio.Channel, request: FetchRequest, timeout_s: float) -> int:
    """Calls KvTransferService.Fetch. Returns the number of leading blocks that were pushed within
    `timeout_s` seconds.

    Raises grpc.aio.AioRpcError.
    """
    call = channel.unary_unary(
        f"/{SERVICE_NAME}/Fetch",
        request_serializer=pb.FetchRequest.SerializeToString,
        response_deserializer=pb.FetchResponse.FromString,
    )
    message = pb.FetchRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        token_ids=request.token_ids,
        target=target_to_proto(request.target),
        granted_tokens=request.granted_tokens,
        capability=request.capability,
        salt=request.salt,
        protocol=protocol_to_proto(request.protocol),
    )
    response = await call(message, timeout=timeout_s)
    return int(response.blocks)


def fetch_request_from_proto(message: pb.FetchRequest) -> FetchRequest:
    """Converts a message to a fetch request."""
    target = target_from_proto(message.target)
    return FetchRequest(
        message.request_id,
        message.attempt,
        tuple(message.token_ids),
        target,
        message.granted_tokens,
        message.capability,
        message.salt,
        protocol_from_proto(message.protocol),
    )


Method = Callable[..., Any]


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
