"""Frames as bytes: protobuf's own, whatever wrote them, and rubbish."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import FailedPrecondition
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    RemoteArena,
    SharedSegment,
    VllmBlocks,
    frame_from_bytes,
    frame_to_bytes,
    pb,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
LAYOUTS = st.builds(
    KvLayout,
    st.lists(
        st.builds(LayerKv, INT32, INT32, INT32)
        | st.builds(LayerKv, INT32, INT32, st.integers(1, 2**31 - 1), st.just(True)),
        max_size=3,
    ).map(tuple),
    INT32,
    st.text(max_size=8),
    st.sampled_from([None, 1, 2]),
)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
IN_VLLM = st.builds(
    VllmBlocks, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), INT32,
    st.lists(INT32, max_size=4).map(tuple), TIMES, TIMES,
)  # fmt: skip
FRAMES = st.one_of(
    st.builds(
        KvOpen, st.text(max_size=5), INT32, INT64, INT64, INT64, st.text(max_size=5),
        st.text(max_size=5),
        st.none() | st.builds(SharedSegment, INT32, INT32, INT64, UINT64),
        st.text(max_size=5), st.text(max_size=5), st.none() | LAYOUTS,
        st.none() | st.builds(RemoteArena, st.binary(max_size=70), UINT64, INT64, INT32),
        st.text(min_size=1, max_size=5),
    ),
    st.builds(
        KvBlocks, INT32, INT32, INT32, INT32, INT32, INT64,
        st.lists(UINT64, max_size=4).map(tuple),
        st.binary(max_size=300).map(lambda data: (data,) if data else ()),
        st.lists(INT32, max_size=4).map(tuple),
    ),
    st.builds(KvCommit, INT32, UINT64, INT32, INT32, st.none() | IN_VLLM),
)  # fmt: skip


@given(FRAMES)
def test_there_and_back(frame: Frame) -> None:
    assert frame_from_bytes(frame_to_bytes(frame)) == frame


@given(FRAMES)
def test_the_bytes_are_those_of_the_proto_file(frame: Frame) -> None:
    data = frame_to_bytes(frame)
    message = pb.KvFrame.FromString(data)
    assert message.SerializeToString() != b"" or data == b""
    if isinstance(frame, KvBlocks):
        assert message.blocks.payload == b"".join(frame.payload)
        assert tuple(message.blocks.digests) == frame.digests
        assert message.blocks.num_bytes == frame.num_bytes


def test_a_peer_that_does_not_know_v_in_k_sees_another_layout() -> None:
    layer = LayerKv(1, 576, 512, v_in_k=True)
    opening = KvOpen("", 0, 0, 0, 0, "", "grpc", layout=KvLayout((layer,), 16, "bfloat16"))
    (sent,) = pb.KvFrame.FromString(frame_to_bytes(opening)).open.layout.layers
    assert (sent.kv_heads, sent.k_dim, sent.v_dim) == (1, 576, 0)


def test_a_payload_in_pieces_is_copied_once_and_read_in_place() -> None:
    pieces = (memoryview(b"ab"), b"cde", memoryview(b"f"))
    data = frame_to_bytes(KvBlocks(0, 1, 2, 0, 3, 6, payload=pieces))
    frame = frame_from_bytes(data)
    assert isinstance(frame, KvBlocks)
    (payload,) = frame.payload
    assert isinstance(payload, memoryview)
    assert (bytes(payload), payload.obj) == (b"abcdef", data)


GOOD = frame_to_bytes(KvBlocks(1, 2, 3, 0, 4, 5, (6, 7), (b"payload",), (8, 9)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "hand-off frame None is unknown"),
        (b"\x12", "a number is cut off"),
        (b"\x12" + b"\xff" * 11, "a number has no end"),
        (b"\x12" + b"\xff" * 9 + b"\x01", "blocks of 18446744073709551615 bytes"),  # 2^64 - 1
        (b"\x12\x05ab", "blocks of 5 bytes exceed the remaining 2 bytes"),
        (GOOD + b"\x00", "a number is cut off"),
        (GOOD + GOOD, "field 2 follows the blocks"),
        (b"\x12\x03\x2a\x7f\x00", "field 5 is cut off"),
        (b"\x12\x05\x2a\x01\x00\x08\x01", "data follows the payload"),
        (b"\x12\x02\x0f\x00", "a field of kind 7"),
        (b"\x12\x02\x09\x00", "field 1 is cut off"),
        (b"\x0a\x05ab", "bytes are not a hand-off frame"),
        (b"\xff" * 20, "bytes are not a hand-off frame"),
        (b"\x80\x02rubbish", "bytes are not a hand-off frame"),
        (
            b"\x0a\x80\x80\x04" + b"\x5a\x00" * 2**15,
            "a frame without KV has 65540 bytes",
        ),
    ],
)
def test_rubbish_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(FailedPrecondition, match=says):
        frame_from_bytes(data)


@given(st.data())
def test_spoiled_frames_are_frames_or_refused(data: st.DataObject) -> None:
    spoiled = bytearray(frame_to_bytes(data.draw(FRAMES)) or b"\x00")
    rng = random.Random(data.draw(st.integers(0, 10**9)))
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0 if spoiled:
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
            case 1:
                del spoiled[rng.randint(0, len(spoiled)) :]
            case _:
                at = rng.randint(0, len(spoiled))
                spoiled[at:at] = rng.randbytes(rng.randint(1, 12))
    try:
        frame = frame_from_bytes(bytes(spoiled))
    except FailedPrecondition:
        return
    if isinstance(frame, KvBlocks):
        assert sum(len(piece) for piece in frame.payload) <= len(spoiled)
        assert max(len(frame.digests), len(frame.source_blocks)) <= len(spoiled)
