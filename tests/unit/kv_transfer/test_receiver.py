"""Frames that no sender of ours would send, over a real connection."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import xxhash
from support.transfer_ends import HASH, KEY, LAYOUT, SENDER, DecodeEnd, MemoryFile, decode_end

from kv_transfer.blocks.arena import digests_of, read_blocks
from kv_transfer.blocks.plan import Layers
from kv_transfer.lease import Lease
from kv_transfer.transports import Source
from kv_transfer.transports.grpc import GrpcInbound
from kvrelay.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    KvRelayError,
    NotFound,
    PermissionDenied,
    Unimplemented,
)
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
    SharedSegment,
    commit_digest,
    frame_to_bytes,
    kv_push,
    receipt_from_proto,
)
from kvrelay.worker_messages import HandoffTarget

BLOCKS = [9, 3, 4, 20]  # of the lease
ALL = Layers(0, len(LAYOUT.layers))


@pytest.fixture
async def decode() -> AsyncIterator[DecodeEnd]:
    async with decode_end() as end:
        yield end


@pytest.fixture
def source() -> MemoryFile:
    return MemoryFile()


async def push(decode: DecodeEnd, frames: Iterable[Frame | bytes]) -> KvReceipt:
    """Sends the frames whether they are wanted or not.

    Not by grpc.aio, where a write that meets the end of the call may take the place of the peer's
    status.
    """
    messages = [frame if isinstance(frame, bytes) else frame_to_bytes(frame) for frame in frames]

    def send() -> KvReceipt:
        with grpc.insecure_channel(decode.address) as channel:
            return receipt_from_proto(kv_push(channel)(iter(messages)))

    try:
        return await asyncio.to_thread(send)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None


def opening(target: HandoffTarget, **changes: Any) -> KvOpen:
    right = KvOpen(*KEY, target.lease_id, target.epoch, target.generation, HASH, transport="grpc")
    return replace(right, **({"sender": SENDER, "capability": target.capability} | changes))


def blocks(
    source: MemoryFile, sequence: int, first: int, numbers: list[int], **changes: Any
) -> KvBlocks:
    payload = read_blocks(source, numbers, ALL).numpy().tobytes()
    digests = tuple(xxhash.xxh3_64_intdigest(source.block(number)) for number in numbers)
    frame = KvBlocks(sequence, first, len(numbers), 0, ALL.num, len(payload), digests, (payload,))
    return replace(frame, **changes)


def commit(frames: Iterable[KvBlocks], **changes: Any) -> KvCommit:
    frames = list(frames)
    digests = [digest for frame in frames for digest in frame.digests]
    hashed = xxhash.xxh3_64(b"".join(one.to_bytes(8, "little") for one in digests))
    whole = replace(KvCommit(len(frames), 0, first_token=42, num_tokens=16), **changes)
    return (
        whole
        if "digest" in changes
        else replace(whole, digest=commit_digest(hashed, whole.first_token, whole.num_tokens))
    )


def whole(source: MemoryFile) -> list[KvBlocks]:
    return [blocks(source, 0, 0, [1, 2]), blocks(source, 1, 2, [5, 4])]


async def refuse(
    decode: DecodeEnd,
    frames: Iterable[Frame | bytes],
    error: type[KvRelayError],
    says: str,
    *,
    writes: bool = False,
) -> None:
    """The push is refused with this error, nothing is committed, and nothing is written unless
    `writes`.
    """
    before = decode.arena.buffer.clone()
    with pytest.raises(error, match=says):
        await push(decode, frames)
    assert decode.committed == []
    assert writes != decode.arena.buffer.equal(before)


async def test_the_right_frames_are_taken(decode: DecodeEnd, source: MemoryFile) -> None:
    frames = whole(source)
    receipt = await push(decode, [opening(decode.grant(BLOCKS)), *frames, commit(frames)])
    assert receipt == KvReceipt(4, 4 * LAYOUT.block_bytes)
    assert [decode.arena.block(n) for n in BLOCKS] == [source.block(n) for n in (1, 2, 5, 4)]
    ((_, token, num_tokens),) = decode.committed
    assert (token, num_tokens) == (42, 16)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"epoch": 6}, FailedPrecondition, "epoch 6 is not the current epoch 7"),
        ({"epoch": 8}, FailedPrecondition, "epoch 8 is not the current epoch"),
        ({"lease_id": 99}, NotFound, "lease 99 does not exist"),
        ({"lease_id": -1}, NotFound, "lease -1 does not exist"),
        ({"generation": 0}, FailedPrecondition, "generation 0 of lease 1"),
        ({"generation": 2}, FailedPrecondition, "generation 2 of lease 1"),
        (
            {"layout_hash": "other"},
            FailedPrecondition,
            "the KV is of model unknown, and this worker has test",
        ),
        (
            # Other weights of the same shapes
            {"layout_hash": "other", "model_id": "another", "layout": LAYOUT},
            FailedPrecondition,
            "the KV is of model another, and this worker has test",
        ),
        ({"request_id": "stranger"}, FailedPrecondition, "lease 1 belongs to another request"),
        ({"attempt": 1}, FailedPrecondition, "lease 1 belongs to another request"),
        ({"capability": ""}, PermissionDenied, "the capability does not match this PushGrant"),
        (
            {"capability": "0" * 32},
            PermissionDenied,
            "the capability does not match this PushGrant",
        ),
        (
            {"sender": "another worker"},
            PermissionDenied,
            "the capability does not match this PushGrant",
        ),
        (
            {"transport": "carrier pigeon"},
            Unimplemented,
            "'carrier pigeon' is not supported by this worker",
        ),
        # Without a segment
        ({"transport": "shm"}, Unimplemented, "'shm' is not supported by this worker"),
        (
            {"transport": "gloo", "rendezvous": "nowhere"},
            FailedPrecondition,
            "'nowhere' is not HOST:PORT/NAME",
        ),
        *(
            (
                {"transport": "gloo", "rendezvous": f"127.0.0.1:{port}/pair"},
                FailedPrecondition,
                "is not HOST:PORT/NAME",
            )
            for port in ("65536", "9" * 27, "\u0663", "-1", "")
        ),
    ],
)
async def test_an_open_frame_with_a_wrong_number_is_refused(
    decode: DecodeEnd,
    source: MemoryFile,
    changes: dict[str, Any],
    error: type[KvRelayError],
    says: str,
) -> None:
    frames = whole(source)
    await refuse(
        decode, [opening(decode.grant(BLOCKS), **changes), *frames, commit(frames)], error, says
    )


async def test_a_push_begins_with_its_open_frame(decode: DecodeEnd, source: MemoryFile) -> None:
    target = decode.grant(BLOCKS)
    await refuse(decode, [], FailedPrecondition, "must be an open frame")
    await refuse(decode, whole(source), FailedPrecondition, "must be an open frame, not KvBlocks")
    await refuse(decode, [b""], FailedPrecondition, "frame None is unknown")
    await refuse(decode, [opening(target), opening(target)], FailedPrecondition, "one open frame")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence": 1}, "received frame 1, and expected frame 0"),
        ({"sequence": -1}, "received frame -1, and expected frame 0"),
        # The first block is cached
        ({"first": 0}, "contains blocks 0 to 1 of the sequence; the lease covers 1 to 3"),
        ({"first": -1}, "contains blocks -1 to 0"),
        ({"first": 3}, "contains blocks 3 to 4"),
        ({"count": 0}, "contains blocks 1 to 0"),
        ({"count": -2}, "contains blocks 1 to -2"),
        ({"count": 2**31 - 1}, "contains blocks 1 to"),
        ({"count": 1}, "bytes for 1 blocks"),
        ({"num_bytes": 2**63 - 1}, "declares 9223372036854775807 bytes for 2 blocks"),
        ({"num_bytes": 0}, "declares 0 bytes for 2 blocks"),
        ({"payload": ()}, "contains 0 bytes and declares"),
        ({"payload": (bytes(2 * LAYOUT.block_bytes - 1),)}, "bytes and declares"),
        ({"payload": (bytes(2 * LAYOUT.block_bytes + 1),)}, "bytes and declares"),
        ({"payload": (bytes(2 * LAYOUT.block_bytes),)}, "arrived with digest"),
        ({"digests": (0, 0)}, "arrived with digest"),
        ({"digests": ()}, "frame 0 has 0 digests for 2 blocks"),
        ({"digests": (1, 2, 3)}, "frame 0 has 3 digests for 2 blocks"),
        ({"first_layer": 1, "num_layers": 1}, "starts at layer 1, and expected layer 0"),
        ({"first_layer": -1}, "contains 2 layers from layer -1 on; the model has 2"),
        ({"num_layers": 3}, "contains 3 layers from layer 0 on; the model has 2"),
        ({"num_layers": 0}, "contains 0 layers from layer 0 on"),
        ({"num_layers": -1}, "contains -1 layers from layer 0 on"),
        ({"num_layers": 1}, "bytes for 2 blocks"),
    ],
)
async def test_a_wrong_frame_is_data_loss(
    decode: DecodeEnd, source: MemoryFile, changes: dict[str, Any], says: str
) -> None:
    frame = replace(blocks(source, 0, 1, [1, 2]), **changes)
    sent = [opening(decode.grant(BLOCKS, cached_blocks=1)), frame]
    await refuse(decode, sent, DataLoss, says, writes=says == "arrived with digest")


@pytest.mark.parametrize("byte", [0, 1000, 2 * LAYOUT.block_bytes - 1])
async def test_one_flipped_bit_is_data_loss(
    decode: DecodeEnd, source: MemoryFile, byte: int
) -> None:
    frame, rest = whole(source)
    payload = bytearray(frame.payload[0])
    payload[byte] ^= 0x10
    frames = [replace(frame, payload=(bytes(payload),)), rest]
    await refuse(
        decode,
        [opening(decode.grant(BLOCKS)), *frames, commit(frames)],
        DataLoss,
        "digest",
        writes=True,
    )


async def test_frames_out_of_order_or_twice_are_data_loss(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    first, second = whole(source)
    target = decode.grant(BLOCKS)
    await refuse(
        decode, [opening(target), second, first], DataLoss, "received frame 1, and expected frame 0"
    )
    await refuse(
        decode,
        [opening(target), first, first],
        DataLoss,
        "received frame 0, and expected frame 1",
        writes=True,
    )
    again = replace(second, first=1)
    await refuse(
        decode,
        [opening(target), second_as_first(second), again],
        DataLoss,
        "a frame is missing",
        writes=True,
    )


def second_as_first(frame: KvBlocks) -> KvBlocks:
    return replace(frame, sequence=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"frames": 1}, "the commit counts 1 frames; 2 arrived"),
        ({"digest": 1}, "the commit has digest 0000000000000001; the digest of the 2 frames"),
        ({"num_tokens": 12}, "12 tokens, which do not match the 4 blocks"),
        ({"num_tokens": 17}, "17 tokens, which do not match"),
        ({"num_tokens": -1}, "-1 tokens, which do not match"),
        ({"first_token": -1}, "first token -1"),
        ({"first_token": 43}, "the digest of the 2 frames"),  # a bit of 42 that flipped
    ],
)
async def test_a_wrong_commit_is_data_loss(
    decode: DecodeEnd, source: MemoryFile, changes: dict[str, Any], says: str
) -> None:
    frames = whole(source)
    sent = [opening(decode.grant(BLOCKS)), *frames, replace(commit(frames), **changes)]
    await refuse(decode, sent, DataLoss, says, writes=True)


async def test_a_commit_without_all_blocks_is_data_loss(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    frames = whole(source)[:1]
    sent = [opening(decode.grant(BLOCKS)), *frames, commit(frames)]
    await refuse(decode, sent, DataLoss, "2 of 4 blocks are missing", writes=True)


async def test_a_push_that_ends_without_a_commit_is_cancelled(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    await refuse(
        decode,
        [opening(decode.grant(BLOCKS)), *whole(source)],
        Cancelled,
        "without a commit",
        writes=True,
    )


async def test_a_refused_push_may_be_tried_again(decode: DecodeEnd, source: MemoryFile) -> None:
    target = decode.grant(BLOCKS)
    frames = whole(source)
    await refuse(decode, [opening(target), frames[1]], DataLoss, "and expected frame")
    await push(decode, [opening(target), *frames, commit(frames)])
    assert len(decode.committed) == 1


async def test_a_late_frame_does_not_reach_blocks_that_are_another_requests(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    """The lease ends in mid-push and its blocks are leased again, before the next frame arrives."""
    target = decode.grant(BLOCKS)
    first, second = whole(source)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        await call.write(frame_to_bytes(opening(target)))
        await call.write(frame_to_bytes(first))
        await written(decode, 9, source.block(1))
        decode.clock.advance(11.0)
        decode.leases.expire(decode.clock.now())
        (released,) = await released_leases(decode)
        new = decode.grant(list(released.blocks), key=("another", 0))
        before = decode.arena.buffer.clone()
        await call.write(frame_to_bytes(second))
        assert await call.code() is grpc.StatusCode.NOT_FOUND
    assert decode.arena.buffer.equal(before)
    late = [opening(target), first, second, commit([first, second])]
    await refuse(decode, late, NotFound, "lease 1 does not exist")
    forged = [opening(target, lease_id=new.lease_id), first]
    await refuse(
        decode,
        forged,
        FailedPrecondition,
        "generation 1 of lease 2 is not the current generation 2",
    )


async def written(decode: DecodeEnd, number: int, block: bytes) -> None:
    while decode.arena.block(number) != block:
        await asyncio.sleep(0.001)


async def released_leases(decode: DecodeEnd) -> list[Lease]:
    while not (leases := decode.leases.release()):
        await asyncio.sleep(0.001)
    return leases


async def test_an_expired_lease_takes_no_frame_even_before_it_is_collected(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    target = decode.grant(BLOCKS)
    decode.clock.advance(10.0)
    await refuse(decode, [opening(target), *whole(source)], FailedPrecondition, "lease 1 has ended")


async def test_a_lease_that_expires_in_mid_push_takes_no_more_frames(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    first, second = whole(source)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        for frame in (opening(decode.grant(BLOCKS)), first):
            await call.write(frame_to_bytes(frame))
        await written(decode, 9, source.block(1))
        before = decode.arena.buffer.clone()
        decode.clock.advance(10.0)
        await call.write(frame_to_bytes(second))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert decode.arena.buffer.equal(before)


async def test_a_lease_that_ends_before_the_commit_is_not_committed(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    frames = whole(source)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        for frame in (opening(decode.grant(BLOCKS)), *frames):
            await call.write(frame_to_bytes(frame))
        await written(decode, 20, source.block(4))
        decode.clock.advance(10.0)
        await call.write(frame_to_bytes(commit(frames)))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert decode.committed == []


async def test_a_revoked_push_ends_although_its_sender_is_silent(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    target = decode.grant(BLOCKS)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        await call.write(frame_to_bytes(opening(target)))
        await call.write(frame_to_bytes(whole(source)[0]))
        await written(decode, 9, source.block(1))
        decode.leases.close(target.lease_id)
        decode.receiver.revoke(target.lease_id)
        decode.receiver.revoke(target.lease_id)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await call.details() == "lease 1 was closed during the push"
    assert [lease.lease_id for lease in await released_leases(decode)] == [1]
    decode.receiver.revoke(target.lease_id)


async def test_blocks_are_not_released_while_they_are_written_to(
    decode: DecodeEnd, source: MemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push is revoked in the middle of a copy, which ends later."""
    copying, go_on = threading.Event(), threading.Event()
    source_of = GrpcInbound.source

    def slow_source(inbound: GrpcInbound, frame: KvBlocks) -> Source:
        copying.set()
        assert go_on.wait(60)
        return source_of(inbound, frame)

    monkeypatch.setattr(GrpcInbound, "source", slow_source)
    target = decode.grant(BLOCKS)
    pushing = asyncio.create_task(push(decode, [opening(target), *whole(source)]))
    assert await asyncio.to_thread(copying.wait, 10)
    decode.leases.close(target.lease_id)
    decode.receiver.revoke(target.lease_id)
    await asyncio.sleep(0.01)
    assert decode.leases.release() == []
    go_on.set()
    with pytest.raises(FailedPrecondition, match="closed during the push"):
        await pushing
    assert [lease.lease_id for lease in decode.leases.release()] == [target.lease_id]


async def test_one_lease_has_one_push_at_a_time(decode: DecodeEnd, source: MemoryFile) -> None:
    target = decode.grant(BLOCKS)
    frames = whole(source)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        await call.write(frame_to_bytes(opening(target)))
        await call.write(frame_to_bytes(frames[0]))
        await written(decode, 9, source.block(1))
        await refuse(decode, [opening(target)], FailedPrecondition, "another push to lease 1")
        await call.write(frame_to_bytes(frames[1]))
        await call.write(frame_to_bytes(commit(frames)))
        assert (await call).blocks == 4


async def test_a_sender_that_vanishes_leaves_the_lease_to_another_push(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    target = decode.grant(BLOCKS)
    frames = whole(source)
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = kv_push(channel)()
        await call.write(frame_to_bytes(opening(target)))
        await call.write(frame_to_bytes(frames[0]))
        await written(decode, 9, source.block(1))
    while decode.receiver.under_way:
        await asyncio.sleep(0.001)
    await push(decode, [opening(target), *frames, commit(frames)])
    assert len(decode.committed) == 1


async def test_a_repeated_push_is_acknowledged_and_writes_nothing(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    frames = whole(source)
    sent = [opening(decode.grant(BLOCKS)), *frames, commit(frames)]
    receipt = await push(decode, sent)
    decode.arena.buffer.zero_()  # by now the blocks are the sequence's own
    assert await push(decode, sent) == receipt
    assert await push(decode, [sent[0], sent[-1]]) == receipt
    assert not decode.arena.buffer.any()
    assert len(decode.committed) == 1


async def test_a_repeated_push_with_other_content_is_refused(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    frames = whole(source)
    target = decode.grant(BLOCKS)
    await push(decode, [opening(target), *frames, commit(frames)])
    with pytest.raises(FailedPrecondition, match="committed with other content"):
        await push(decode, [opening(target), *frames, commit(frames, first_token=43)])
    assert len(decode.committed) == 1


def shared(source: MemoryFile, **changes: Any) -> SharedSegment:
    assert source.fd is not None
    return replace(
        SharedSegment(os.getpid(), source.fd, source.buffer.numel(), source.nonce), **changes
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pid": 2**22 + 1}, "cannot open /proc/4194305/fd"),
        ({"fd": 0}, "does not contain arena"),  # some other file of that process
        ({"fd": 100_000}, "cannot open"),
        ({"fd": -1}, "cannot open"),
        ({"nonce": 1}, "does not contain arena 1 "),
        ({"size": 1}, "of 1 bytes"),
        ({"size": 2**62}, "of 4611686018427387904 bytes"),
    ],
)
async def test_a_segment_that_is_not_the_senders_arena_is_not_mapped(
    decode: DecodeEnd, source: MemoryFile, changes: dict[str, int], says: str
) -> None:
    sent = opening(decode.grant(BLOCKS), transport="shm", segment=shared(source, **changes))
    await refuse(decode, [sent], Unimplemented, says)


async def test_an_arena_that_could_shrink_is_not_mapped(decode: DecodeEnd) -> None:
    source = MemoryFile(sealed=False)
    sent = opening(decode.grant(BLOCKS), transport="shm", segment=shared(source))
    await refuse(decode, [sent], Unimplemented, "is not sealed against shrinking")


async def test_an_arena_of_another_shape_is_not_read(decode: DecodeEnd, source: MemoryFile) -> None:
    assert source.fd is not None
    os.ftruncate(source.fd, source.buffer.numel() + 4096)
    segment = shared(source, size=source.buffer.numel() + 4096)
    sent = opening(decode.grant(BLOCKS), transport="shm", segment=segment)
    await refuse(decode, [sent], Unimplemented, "does not match the layout of the sender's arena")


@pytest.mark.parametrize("numbers", [(1, 32), (-1, 2), (1,), (1, 2, 3), ()])
async def test_named_blocks_outside_of_the_segment_are_data_loss(
    decode: DecodeEnd, source: MemoryFile, numbers: tuple[int, ...]
) -> None:
    frame = blocks(source, 0, 0, [1, 2], payload=(), source_blocks=numbers)
    sent = [opening(decode.grant(BLOCKS), transport="shm", segment=shared(source)), frame]
    await refuse(decode, sent, DataLoss, "frame 0 names")


async def test_a_source_that_changed_after_its_digest_is_data_loss(
    decode: DecodeEnd, source: MemoryFile
) -> None:
    digests = digests_of(source, [1, 2], ALL)
    frame = blocks(source, 0, 0, [1, 2], payload=(), source_blocks=(1, 2), digests=digests)
    source.buffer[2 * LAYOUT.region_block_bytes[0]] += 1
    sent = [opening(decode.grant(BLOCKS), transport="shm", segment=shared(source)), frame]
    await refuse(decode, sent, DataLoss, "arrived with digest", writes=True)
