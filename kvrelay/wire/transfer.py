"""A hand-off's messages: proto/kvrelay/v1/transfer.proto to frozen values and back."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import FailedPrecondition
from kvrelay.v1 import transfer_pb2 as pb
from kvrelay.v1.transfer_pb2_grpc import (
    KvTransferServiceServicer,
    KvTransferServiceStub,
    add_KvTransferServiceServicer_to_server,
)

__all__ = [
    "SERVICE_NAME",
    "Frame",
    "KvBlocks",
    "KvCommit",
    "KvOpen",
    "KvReceipt",
    "KvTransferServiceServicer",
    "KvTransferServiceStub",
    "SharedSegment",
    "add_KvTransferServiceServicer_to_server",
    "frame_from_proto",
    "frame_to_proto",
    "pb",
    "receipt_from_proto",
    "receipt_to_proto",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["KvTransferService"].full_name


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """The sender's arena as an anonymous memory file: `kvrelay-NONCE` behind /proc/PID/fd/FD, `size` bytes."""

    pid: int
    fd: int
    size: int
    nonce: int


@dataclass(frozen=True, slots=True)
class KvOpen:
    """Which lease the push is for, and how its bytes travel."""

    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    segment: SharedSegment | None = None  # memory, shm
    rendezvous: str = ""  # gloo, nccl: HOST:PORT/NAME of the sender's store and of the group in it


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """A run of the lease's blocks: indices first to first + count - 1."""

    sequence: int  # 0, 1, 2, ... within the push
    first: int
    count: int
    num_bytes: int
    digest: int = 0  # xxh3-64 of the bytes in plan order; 0 when digests are off
    payload: bytes = b""  # grpc
    source_blocks: tuple[int, ...] = ()  # memory, shm: block numbers in the sender's arena


@dataclass(frozen=True, slots=True)
class KvCommit:
    """The end of a push. `digest` is xxh3-64 over the frames' digests, 8 bytes each, little endian."""

    frames: int
    digest: int
    first_token: int
    num_tokens: int  # tokens whose KV was sent or is cached


@dataclass(frozen=True, slots=True)
class KvReceipt:
    """What the receiver took over: blocks sent, and their bytes."""

    blocks: int
    bytes: int


Frame = KvOpen | KvBlocks | KvCommit


def frame_to_proto(frame: Frame) -> pb.KvFrame:
    match frame:
        case KvOpen():
            segment = None
            if frame.segment is not None:
                shared = frame.segment
                segment = pb.SharedSegment(pid=shared.pid, fd=shared.fd, size=shared.size, nonce=shared.nonce)
            return pb.KvFrame(
                open=pb.KvOpen(
                    request_id=frame.request_id,
                    attempt=frame.attempt,
                    lease_id=frame.lease_id,
                    epoch=frame.epoch,
                    generation=frame.generation,
                    layout_hash=frame.layout_hash,
                    transport=frame.transport,
                    segment=segment,
                    rendezvous=frame.rendezvous,
                )
            )
        case KvBlocks():
            return pb.KvFrame(
                blocks=pb.KvBlocks(
                    sequence=frame.sequence,
                    first=frame.first,
                    count=frame.count,
                    num_bytes=frame.num_bytes,
                    digest=frame.digest,
                    payload=frame.payload,
                    source_blocks=frame.source_blocks,
                )
            )
        case KvCommit():
            return pb.KvFrame(
                commit=pb.KvCommit(
                    frames=frame.frames,
                    digest=frame.digest,
                    first_token=frame.first_token,
                    num_tokens=frame.num_tokens,
                )
            )


def frame_from_proto(message: pb.KvFrame) -> Frame:
    """Raises FailedPrecondition for a frame of a kind that this version does not know."""
    match message.WhichOneof("frame"):
        case "open":
            return _open_from_proto(message.open)
        case "blocks":
            blocks = message.blocks
            return KvBlocks(
                sequence=blocks.sequence,
                first=blocks.first,
                count=blocks.count,
                num_bytes=blocks.num_bytes,
                digest=blocks.digest,
                payload=blocks.payload,
                source_blocks=tuple(blocks.source_blocks),
            )
        case "commit":
            commit = message.commit
            return KvCommit(commit.frames, commit.digest, commit.first_token, commit.num_tokens)
        case unknown:
            raise FailedPrecondition(f"hand-off frame {unknown!r} is not one that this version knows")


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
    )


def receipt_to_proto(receipt: KvReceipt) -> pb.KvReceipt:
    return pb.KvReceipt(blocks=receipt.blocks, bytes=receipt.bytes)


def receipt_from_proto(message: pb.KvReceipt) -> KvReceipt:
    return KvReceipt(message.blocks, message.bytes)
