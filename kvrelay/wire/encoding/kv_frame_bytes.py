"""The frames of a push as bytes, which are those of KvFrame in proto/kvrelay/v1/transfer.proto.

Blocks are encoded and decoded without the generated code. So a payload of several MiB is copied
once when it leaves an arena, and not at all when it arrives.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvrelay.errors import FailedPrecondition
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.v1 import transfer_pb2 as pb
from kvrelay.wire.encoding import varint
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.kv_frame import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    RemoteArena,
    SharedSegment,
    VllmBlocks,
)
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto

# Limited, because empty layers in an open frame take many times their size in memory.
_MAX_BYTES_WITHOUT_KV = 2**16
_BLOCKS_TAG = varint.tag(pb.KvFrame.BLOCKS_FIELD_NUMBER)
_PAYLOAD_TAG = varint.tag(pb.KvBlocks.PAYLOAD_FIELD_NUMBER)


def frame_to_bytes(frame: Frame) -> bytes:
    """Encodes a frame. A payload is copied once."""
    match frame:
        case KvOpen():
            return pb.KvFrame(open=_open_to_proto(frame)).SerializeToString()
        case KvBlocks():
            return _blocks_to_bytes(frame)
        case KvCommit():
            return pb.KvFrame(commit=_commit_to_proto(frame)).SerializeToString()


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
            return _commit_from_proto(message.commit)
        case unknown:
            raise FailedPrecondition(f"hand-off frame {unknown!r} is unknown to this version")


def _blocks_to_bytes(frame: KvBlocks) -> bytes:
    head = to_message(pb.KvBlocks, frame, payload=b"").SerializeToString()
    size = sum(len(piece) for piece in frame.payload)
    if size:
        head += _PAYLOAD_TAG + varint.encoded(size)
    return b"".join((_BLOCKS_TAG, varint.encoded(len(head) + size), head, *frame.payload))


def _blocks_from_bytes(data: bytes) -> KvBlocks:
    """Decodes a blocks frame. The payload is the last field, so the other fields can be parsed
    without it.
    """
    view = memoryview(data)
    start, whole = _blocks_span(view)
    end, payload = whole, view[:0]
    for number, at, first, last in varint.fields(view[:whole], start):
        if number == pb.KvBlocks.PAYLOAD_FIELD_NUMBER:
            if last != whole:
                raise varint.Malformed("data follows the payload")
            end, payload = at, view[first:last]
    head = pb.KvBlocks.FromString(data[start:end])
    return to_value(
        KvBlocks,
        head,
        digests=tuple(head.digests),
        payload=(payload,) if payload else (),
        source_blocks=tuple(head.source_blocks),
    )


def _blocks_span(view: memoryview) -> tuple[int, int]:
    """Begin and end of the blocks in a frame that begins with their tag."""
    length, start = varint.decode(view, len(_BLOCKS_TAG))
    whole = start + length
    if whole > len(view):
        raise varint.Malformed(
            f"blocks of {length} bytes exceed the remaining {len(view) - start} bytes of the "
            "message"
        )
    for number, *_ in varint.fields(view, whole):
        if number == 0 or number in pb.KvFrame.DESCRIPTOR.fields_by_number:
            raise varint.Malformed(f"field {number} follows the blocks")
    return start, whole


def _open_to_proto(frame: KvOpen) -> pb.KvOpen:
    segment, arena, layout = frame.segment, frame.arena, frame.layout
    return to_message(
        pb.KvOpen,
        frame,
        segment=None if segment is None else to_message(pb.SharedSegment, segment),
        layout=None if layout is None else _layout_to_proto(layout),
        arena=None if arena is None else to_message(pb.RemoteArena, arena),
        protocol=protocol_to_proto(frame.protocol),
    )


def _open_from_proto(message: pb.KvOpen) -> KvOpen:
    return to_value(
        KvOpen,
        message,
        segment=to_value(SharedSegment, message.segment) if message.HasField("segment") else None,
        layout=_layout_from_proto(message.layout) if message.HasField("layout") else None,
        arena=to_value(RemoteArena, message.arena) if message.HasField("arena") else None,
        digest=message.digest or "xxh3",
        protocol=protocol_from_proto(message.protocol),
    )


def _commit_to_proto(frame: KvCommit) -> pb.KvCommit:
    in_vllm = frame.in_vllm
    return to_message(
        pb.KvCommit,
        frame,
        in_vllm=None if in_vllm is None else to_message(pb.VllmBlocks, in_vllm),
    )


def _commit_from_proto(message: pb.KvCommit) -> KvCommit:
    in_vllm = None
    if message.HasField("in_vllm"):
        blocks = tuple(message.in_vllm.blocks)
        in_vllm = to_value(VllmBlocks, message.in_vllm, blocks=blocks)
    return to_value(KvCommit, message, in_vllm=in_vllm)


def _layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return to_message(
        pb.KvLayout,
        layout,
        layers=[_layer_to_proto(layer) for layer in layout.layers],
        word=layout.word or 0,
    )


def _layout_from_proto(message: pb.KvLayout) -> KvLayout:
    return to_value(
        KvLayout,
        message,
        layers=tuple(_layer_from_proto(layer) for layer in message.layers),
        word=message.word or None,
        ranks=message.ranks or 1,
        windows=tuple(message.windows),
    )


def _layer_to_proto(layer: LayerKv) -> pb.LayerKv:
    dims = {"v_dim": 0, "v_in_k": layer.v_dim} if layer.v_in_k else {"v_in_k": 0}
    return to_message(pb.LayerKv, layer, **dims)


def _layer_from_proto(message: pb.LayerKv) -> LayerKv:
    v_dim = message.v_in_k or message.v_dim
    return to_value(LayerKv, message, v_dim=v_dim, v_in_k=message.v_in_k != 0)
