"""A hand-off's messages: proto/kvrelay/v1/transfer.proto to frozen values and back.

Frames are written and read as bytes, not through generated code: a payload of some MiB is copied
once on its way out of an arena and not at all on its way in. What is on the wire is the message
that the .proto file describes.
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
    """The sender's arena, of `size` bytes, for a receiver that reads it without the sender's help.

    nixl: `access` is the metadata of the sender's agent, `start` an address in the sender's
    process. cuda_ipc: `access` is the handle of the allocation, `start` counts from where that
    begins. `device`: the sender's GPU, or -1.
    """

    access: bytes
    start: int
    size: int
    device: int = -1


@dataclass(frozen=True, slots=True)
class KvOpen:
    """Which lease the push is for, what lies in the sender's blocks, and how its bytes travel."""

    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    segment: SharedSegment | None = None  # memory, shm
    rendezvous: str = ""  # gloo, nccl: HOST:PORT/NAME of the sender's store and of the group in it
    model_id: str = ""
    layout: KvLayout | None = None  # of the sender's arena; none is one like the receiver's
    arena: RemoteArena | None = None  # nixl, cuda_ipc
    digest: str = "xxh3"  # the kind that blocks' digests are of
    sender: str = ""  # worker id
    capability: str = field(default="", repr=False)  # as the target has it
    protocol: Protocol = field(default_factory=ours)  # of the sender


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Some layers of blocks first to first + count - 1 of the sequence, as the sender counts
    blocks.
    """

    sequence: int  # 0, 1, 2, ... within the push
    first: int
    count: int
    first_layer: int
    num_layers: int
    num_bytes: int
    # Of each block: of these layers' bytes in plan order; none when they are off
    digests: tuple[int, ...] = ()
    payload: tuple[Buffer, ...] = ()  # grpc: the bytes, in pieces
    # Block numbers in the sender's arena, where the receiver reads them from there
    source_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvCommit:
    """The end of a push. `digest` is what `commit_digest` makes of it."""

    frames: int
    digest: int
    first_token: int
    num_tokens: int  # tokens whose KV was sent or is cached


def commit_digest(blocks: xxhash.xxh3_64, first_token: int, num_tokens: int) -> int:
    """XXH3-64 over all blocks' digests, which `blocks` has taken in, and the two numbers: the
    answer goes on from the first token, so it has to be right as the KV has. Each is 8 bytes,
    little endian.
    """
    whole = blocks.copy()
    for number in (first_token, num_tokens):
        whole.update(number.to_bytes(8, "little", signed=True))
    return whole.intdigest()


@dataclass(frozen=True, slots=True)
class KvReceipt:
    """What the receiver took over: blocks sent, and their bytes."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks for the KV of these tokens, to be pushed to the asking worker's lease.

    Tokens whose KV the target has cached are not pushed. A worker of 0.1, which knows blocks by
    64-bit hashes, sends no tokens.
    """

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]  # from the sequence's start to where its KV is wanted
    target: HandoffTarget
    granted_tokens: int  # from the request's start, that the capability is for
    capability: str = field(repr=False)
    salt: str = field(default="", repr=False)  # of the sequence
    protocol: Protocol = field(default_factory=ours)  # of the asking worker


Frame = KvOpen | KvBlocks | KvCommit


def frame_to_bytes(frame: Frame) -> bytes:
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
    """The payload is a view of `data`. Raises FailedPrecondition for what is no frame that this
    version knows.

    Allocates nothing that a length in the data could make larger than the data itself.
    """
    try:
        if data[:1] == _BLOCKS_TAG:
            return _blocks_from_bytes(data)
        if len(data) > _MAX_BYTES_WITHOUT_KV:
            raise FailedPrecondition(
                f"{len(data)} bytes are too many for a frame that brings no KV"
            )
        message = pb.KvFrame.FromString(data)
    except (DecodeError, varint.Malformed) as error:
        raise FailedPrecondition(f"{len(data)} bytes are no hand-off frame: {error}") from None
    match message.WhichOneof("frame"):
        case "open":
            return _open_from_proto(message.open)
        case "commit":
            commit = message.commit
            return KvCommit(commit.frames, commit.digest, commit.first_token, commit.num_tokens)
        case unknown:
            raise FailedPrecondition(
                f"hand-off frame {unknown!r} is not one that this version knows"
            )


_MAX_BYTES_WITHOUT_KV = 2**16  # empty layers in an open frame would take many times their own size
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
    """The payload's field is the last one, so that the others can be read without it."""
    view = memoryview(data)
    length, start = varint.decode(view, len(_BLOCKS_TAG))
    whole = start + length
    if whole > len(data):
        raise varint.Malformed(
            f"blocks of {length} bytes in a message that has {len(data) - start} for them"
        )
    for number, *_ in varint.fields(view, whole):
        if number == 0 or number in pb.KvFrame.DESCRIPTOR.fields_by_number:
            raise varint.Malformed(f"field {number} follows the blocks")
    end = whole
    payload = view[:0]
    for number, at, first, last in varint.fields(view[:whole], start):
        if number == pb.KvBlocks.PAYLOAD_FIELD_NUMBER:
            if last != whole:
                raise varint.Malformed("something follows the payload")
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
    return pb.KvReceipt(blocks=receipt.blocks, bytes=receipt.bytes)


def receipt_from_proto(message: pb.KvReceipt) -> KvReceipt:
    return KvReceipt(message.blocks, message.bytes)


def kv_push(channel: grpc.aio.Channel) -> grpc.aio.StreamUnaryMultiCallable:
    """KvTransferService.Push; frames go in as `frame_to_bytes` makes them."""
    return channel.stream_unary(
        f"/{SERVICE_NAME}/Push", response_deserializer=pb.KvReceipt.FromString
    )


async def kv_fetch(channel: grpc.aio.Channel, request: FetchRequest, timeout_s: float) -> int:
    """KvTransferService.Fetch: how many blocks were pushed, of the leading ones, within `timeout_s`
    seconds.

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
    """Serves KvTransferService; `push` is given frames as bytes."""
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
