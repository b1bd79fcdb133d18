"""What a network, a peer that dies and a peer that means harm can do to a hand-off, over each
transport.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.tcp_proxy import proxy_to
from support.transfer_ends import (
    KEY,
    LAYOUT,
    DecodeEnd,
    MemoryFile,
    decode_end,
    needs_nixl,
    sender_of,
)
from support.transfer_lender import lender

from kv_transfer import receiver
from kv_transfer.push import Push
from kv_transfer.sender import Sender
from kv_transfer.transports.pair_group import PairGroup
from kv_transfer.transports.shm import SegmentCache
from kvrelay.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    KvRelayError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import (
    KvBlocks,
    KvCommit,
    KvOpen,
    SharedSegment,
    frame_from_bytes,
    frame_to_bytes,
    kv_push,
    receipt_from_proto,
)
from kvrelay.worker_messages import HandoffTarget

TESTS = Path(__file__).parents[2]
TRANSPORTS = [
    *map(pytest.param, ["memory", "shm", "grpc", "gloo"]),
    pytest.param("nixl", marks=needs_nixl),
]
BETWEEN_PROCESSES = TRANSPORTS[1:]
BLOCKS = [9, 3, 4, 20]

Frames = AsyncGenerator[bytes, None]


def intercepted(
    change: Callable[[Frames], Frames], verdicts: list[grpc.StatusCode] | None = None
) -> Any:
    """An interceptor that puts `change` between a connection and the receiver, and notes what that
    says.
    """

    async def intercept(continuation: Any, details: Any) -> Any:
        handler = await continuation(details)

        async def push(frames: Frames, context: grpc.aio.ServicerContext) -> Any:
            try:
                async with aclosing(change(frames)) as changed:
                    return await handler.stream_unary(changed, context)
            finally:
                if verdicts is not None:
                    verdicts.append(
                        grpc.StatusCode(context.code()) if context.code() else grpc.StatusCode.OK
                    )

        return grpc.stream_unary_rpc_method_handler(
            push, handler.request_deserializer, handler.response_serializer
        )

    return intercept


def is_blocks(message: bytes) -> bool:
    return isinstance(frame_from_bytes(message), KvBlocks)


async def hand_over(
    sender: Sender, decode: DecodeEnd, key: tuple[str, int], transport: str, **where: str
) -> None:
    """Two frames of two blocks each to BLOCKS."""
    await pushed(sender.open(key, decode.grant(BLOCKS, key=key, transport=transport, **where)))


async def pushed(push: Push) -> None:
    push.send(0, [1, 2])
    push.send(2, [5, 4])
    await push.commit(42, 4 * LAYOUT.block_size, 0.0)


def arrived(decode: DecodeEnd) -> list[bytes]:
    return [decode.arena.block(n) for n in BLOCKS]


def end_leases(decode: DecodeEnd) -> None:
    """As a worker does: all blocks must come back."""
    for lease in list(decode.leases):
        decode.leases.close(lease.lease_id)
        decode.receiver.revoke(lease.lease_id)


async def all_blocks_back(decode: DecodeEnd) -> None:
    async with asyncio.timeout(60):
        while decode.receiver.under_way:
            await asyncio.sleep(0.001)
    await all_blocks_released(decode)


async def all_blocks_released(decode: DecodeEnd) -> None:
    async with asyncio.timeout(60):
        while len(decode.leases):  # a copy may be under way
            decode.leases.release()
            await asyncio.sleep(0.001)


class Tampering:
    """Harm done on the way, once."""

    def __init__(self, way: str, source: MemoryFile) -> None:
        self.way = way
        self.source = source
        self.done = 0

    async def __call__(self, frames: Frames) -> Frames:
        held: bytes | None = None
        async for message in frames:
            if self.done or not is_blocks(message):
                yield message
                continue
            match self.way:
                case "flipped":
                    self.done += 1
                    yield self.flip(message)
                case "truncated":
                    self.done += 1
                    yield message[:-7]
                case "twice":
                    self.done += 1
                    yield message
                    yield message
                case "reordered" if held is None:
                    held = message
                case "reordered":
                    self.done += 1
                    yield message
                    yield held
                case "overtaken" if held is None:
                    held = message
                    yield message
                case "overtaken":
                    self.done += 1  # the commit comes next

    def flip(self, message: bytes) -> bytes:
        """A bit of the KV: in the frame, or in the arena that the receiver reads from."""
        frame = frame_from_bytes(message)
        assert isinstance(frame, KvBlocks)
        if frame.payload:
            return message[:-100] + bytes([message[-100] ^ 4]) + message[-99:]
        self.source.buffer[2 * LAYOUT.region_block_bytes[0]] ^= 4  # block 2, after it was digested
        return message


@pytest.mark.parametrize(
    ("way", "transport"),
    [
        pytest.param(way, *transport.values, marks=transport.marks)
        for way in ("flipped", "truncated", "twice", "reordered", "overtaken")
        for transport in TRANSPORTS
        # A sender by gloo waits with the second frame for the first one's arrival.
        if (way, *transport.values) != ("reordered", "gloo")
    ],
)
async def test_kv_that_was_tampered_with_is_not_committed(
    way: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemoryFile()
    tampering = Tampering(way, source)
    if (way, transport) == ("flipped", "gloo"):  # whose bytes travel beside the frames
        send = PairGroup.send

        def flip(group: PairGroup, data: Any) -> None:
            if not tampering.done:
                tampering.done += 1
                data[100] ^= 4
            send(group, data)

        monkeypatch.setattr(PairGroup, "send", flip)
    verdicts: list[grpc.StatusCode] = []
    intercept = intercepted(tampering, verdicts)
    async with (
        decode_end(timeout_s=2.0, intercept=intercept) as decode,
        sender_of(source, timeout_s=2.0) as sender,
    ):
        # What gRPC says to a sender that is writing just then is that the push has ended.
        with pytest.raises((DataLoss, FailedPrecondition, Unavailable)):
            await hand_over(sender, decode, KEY, transport)
        assert tampering.done == 1
        async with asyncio.timeout(60):
            while not verdicts:  # the sender may hear of it first
                await asyncio.sleep(0.001)
        no_frame = way == "truncated"
        assert verdicts[0] is (
            grpc.StatusCode.FAILED_PRECONDITION if no_frame else grpc.StatusCode.DATA_LOSS
        )
        assert decode.committed == []
        end_leases(decode)
        await all_blocks_back(decode)
        source.buffer.copy_(MemoryFile().buffer)
        await hand_over(sender, decode, ("again", 0), transport)
        assert arrived(decode) == [source.block(n) for n in (1, 2, 5, 4)]
        assert len(decode.committed) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_frame_that_comes_after_its_blocks_were_given_away_is_refused(
    transport: str,
) -> None:
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold_the_second(frames: Frames) -> Frames:
        count = 0
        async for message in frames:
            count += is_blocks(message)
            if count == 2 and not held.is_set():
                held.set()
                await go_on.wait()
            yield message

    source, other = MemoryFile(), MemoryFile(seed=5)
    async with (
        decode_end(intercept=intercepted(hold_the_second)) as decode,
        sender_of(source) as sender,
        sender_of(other) as another,
    ):
        late = asyncio.create_task(hand_over(sender, decode, KEY, transport))
        async with asyncio.timeout(60):
            await held.wait()
            while decode.arena.block(BLOCKS[1]) != source.block(2):
                await asyncio.sleep(0.001)
        decode.clock.advance(11.0)
        assert [lease.key for lease in decode.leases.expire(decode.clock.now())] == [KEY]
        await all_blocks_released(decode)
        await hand_over(another, decode, ("new", 0), transport)
        go_on.set()
        with pytest.raises(NotFound, match="lease 1 does not exist"):
            await late
        assert arrived(decode) == [other.block(n) for n in (1, 2, 5, 4)]
        assert [lease.key for lease, _, _ in decode.committed] == [("new", 0)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
async def test_a_sender_that_is_killed_in_mid_push_leaves_nothing(transport: str) -> None:
    async with decode_end(timeout_s=2.0) as decode, sender_of(MemoryFile()) as sender:
        target = decode.grant(BLOCKS, transport=transport)
        command = [sys.executable, "-m", "support.transfer_sender", json.dumps(asdict(target))]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"sent\n"
        assert decode.receiver.under_way == 1
        process.kill()
        await process.wait()
        async with asyncio.timeout(60):
            while decode.receiver.under_way:
                await asyncio.sleep(0.001)
        assert decode.committed == []
        end_leases(decode)
        await all_blocks_back(decode)
        await hand_over(sender, decode, ("again", 0), transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_partition_that_heals_after_the_request_has_moved_changes_nothing(
    transport: str,
) -> None:
    source = MemoryFile()
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(decode_end()) for _ in range(2)]
        network = await stack.enter_async_context(proxy_to(first.address))
        sender = await stack.enter_async_context(sender_of(source))
        push = sender.open(KEY, first.grant(BLOCKS, transport=transport, address=network.address))
        push.send(0, [1, 2])
        async with asyncio.timeout(60):
            while first.arena.block(BLOCKS[1]) != source.block(2):
                await asyncio.sleep(0.001)
        network.part()
        push.send(2, [5, 4])
        late = asyncio.create_task(push.commit(42, 4 * LAYOUT.block_size, 0.0))
        async with asyncio.timeout(60):
            while not network.held_back:
                await asyncio.sleep(0.001)
        # The lease ends meanwhile, and its blocks are another's.
        end_leases(first)
        await all_blocks_back(first)
        first.grant(BLOCKS, key=("new", 0))
        before = first.arena.buffer.clone()
        await hand_over(sender, second, (KEY[0], 1), transport)
        network.heal()
        with pytest.raises(KvRelayError, match="lease 1"):
            await late
        assert first.arena.buffer.equal(before)
        assert first.committed == []
        assert [lease.key for lease, _, _ in second.committed] == [(KEY[0], 1)]
        assert arrived(second) == [source.block(n) for n in (1, 2, 5, 4)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_answer_that_is_lost_with_its_connection_is_asked_for_again(
    transport: str,
) -> None:
    source = MemoryFile()
    async with (
        decode_end() as decode,
        proxy_to(decode.address) as network,
        sender_of(source) as sender,
    ):
        target = decode.grant(BLOCKS, transport=transport, address=network.address)
        push = sender.open(KEY, target)
        push.send(0, [1, 2])
        async with asyncio.timeout(60):
            while decode.arena.block(BLOCKS[1]) != source.block(2):
                await asyncio.sleep(0.001)
        network.passes["down"].clear()
        push.send(2, [5, 4])
        committing = asyncio.create_task(push.commit(42, 4 * LAYOUT.block_size, 0.0))
        async with asyncio.timeout(60):
            while not (decode.committed and network.held_back):
                await asyncio.sleep(0.001)
        assert not committing.done()
        decode.arena.buffer.zero_()  # by now the blocks are the sequence's
        network.heal()
        network.reset()
        handoff = await committing
        assert (handoff.blocks, len(decode.committed)) == (4, 1)
        assert not decode.arena.buffer.any()
        await all_blocks_back(decode)


async def test_a_repeated_fetch_is_executed_once() -> None:
    async with (
        lender() as lent,
        proxy_to(lent.address) as network,
        grpc.aio.insecure_channel(network.address) as channel,
    ):
        request = lent.right
        await channel.channel_ready()
        network.passes["down"].clear()
        lost = asyncio.create_task(lent.ask(request, channel))
        async with asyncio.timeout(60):
            while not (lent.asking.committed and network.held_back):
                await asyncio.sleep(0.001)
        network.reset()
        network.heal()
        with pytest.raises(Unavailable):
            await lost
        lent.asking.arena.buffer.zero_()  # by now the blocks are the sequence's
        assert await lent.ask(request) == len(BLOCKS)
        assert len(lent.asking.committed) == 1
        assert not lent.asking.arena.buffer.any()
        assert lent.cache.pool.num_held == 0


async def test_a_sender_that_stalls_in_a_frame_holds_blocks_no_longer_than_its_lease() -> None:
    layout = KvLayout((LayerKv(8, 64, 64),) * 4, block_size=16, dtype="float32")  # 256 KiB a block
    async with (
        decode_end(layout) as decode,
        proxy_to(decode.address) as network,
        sender_of(MemoryFile(layout), timeout_s=2.0) as sender,
    ):
        network.limit = 100_000
        push = sender.open(KEY, decode.grant(BLOCKS, address=network.address))
        push.send(0, [1, 2, 5, 4])
        async with asyncio.timeout(60):
            while not (network.held_back and decode.receiver.under_way):
                await asyncio.sleep(0.001)
        before = decode.arena.buffer.clone()
        decode.clock.advance(11.0)
        for lease in decode.leases.expire(decode.clock.now()):
            decode.receiver.revoke(lease.lease_id)
        await all_blocks_back(decode)
        assert decode.arena.buffer.equal(before)
        await push.abort()
        assert push.error is not None


async def test_pushes_that_do_not_open_are_capped_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_MAX_UNOPENED", 8)
    async with decode_end(timeout_s=0.5) as decode, sender_of(MemoryFile()) as sender:
        async with grpc.aio.insecure_channel(decode.address) as channel:
            calls = [kv_push(channel)() for _ in range(30)]
            codes = [await call.code() for call in calls]
            # Some may begin only after others have ended.
            refused = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert 0 < refused <= 22
            assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 30 - refused
            errors = [error_from_rpc(await failure(call)) for call in calls]
        assert {type(error) for error in errors} == {ResourceExhausted, DeadlineExceeded}
        assert {error.retry_after_s for error in errors} == {0.5, None}
        await hand_over(sender, decode, KEY, "grpc")
        assert len(decode.committed) == 1


async def failure(call: grpc.aio.StreamUnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def test_connections_that_say_nothing_are_in_nobodys_way() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        host, _, port = decode.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        await hand_over(sender, decode, KEY, "grpc")
        assert len(decode.committed) == 1
        for _, writer in silent:
            assert not writer.is_closing()
            writer.transport.abort()


async def test_a_repetition_that_falls_silent_ends() -> None:
    """Its lease is committed and ends no more."""
    source = MemoryFile()
    async with decode_end(timeout_s=0.3) as decode, sender_of(source) as sender:
        target = decode.grant(BLOCKS)
        await pushed(sender.open(KEY, target))
        async with grpc.aio.insecure_channel(decode.address) as channel:
            call = kv_push(channel)()
            await call.write(frame_to_bytes(sender_opening(sender, target)))
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the commit was not repeated within 0.3 s"
        assert decode.receiver.under_way == 0


def sender_opening(sender: Sender, target: HandoffTarget) -> KvOpen:
    numbers = target.lease_id, target.epoch, target.generation
    opening = KvOpen(*KEY, *numbers, sender.layout_hash, "grpc")
    return replace(opening, sender=sender.worker_id, capability=target.capability)


async def test_bytes_after_the_end_are_discarded() -> None:
    """Of a frame: with the frame. Of a push: after its commit nothing is read."""
    source = MemoryFile()
    passed: list[bytes] = []

    async def record(frames: Frames) -> Frames:
        async for message in frames:
            passed.append(message)
            yield message

    async with decode_end(intercept=intercepted(record)) as decode, sender_of(source) as sender:
        await hand_over(sender, decode, KEY, "grpc")
        opening, first, second, commit = (frame_from_bytes(message) for message in passed)
        assert isinstance(opening, KvOpen)
        assert isinstance(commit, KvCommit)
        target = decode.grant([1, 2, 5, 6])
        again = replace(
            sender_opening(sender, target), layout=opening.layout, model_id=opening.model_id
        )
        async with grpc.aio.insecure_channel(decode.address) as channel:
            call = kv_push(channel)()
            for frame in (frame_to_bytes(again), passed[1] + b"\x00\x00"):
                await call.write(frame)
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            frames = [again, first, second, commit, replace(first, first=2), commit]
            receipt = receipt_from_proto(
                await kv_push(channel)(iter([frame_to_bytes(frame) for frame in frames]))
            )
        assert receipt.blocks == 4
        assert [decode.arena.block(n) for n in (1, 2, 5, 6)] == [
            source.block(n) for n in (1, 2, 5, 4)
        ]
        assert len(decode.committed) == 2


def test_a_pipe_in_place_of_an_arena_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        segment = SharedSegment(os.getpid(), fd, 1000, 1)
        with (
            pytest.raises(Unimplemented, match="does not contain arena"),
            SegmentCache().lend(segment, LAYOUT),
        ):
            pass
    finally:
        os.close(fd)


LARGE = KvLayout((LayerKv(8, 128, 128),) * 4, block_size=16, dtype="float32")  # 512 KiB a block


@pytest.mark.parametrize("transport", ["gloo"])
async def test_a_slow_receiver_bounds_what_is_packed(transport: str) -> None:
    """Of 64 MiB. Of memory and shm nothing is packed at all: the receiver reads where the blocks
    lie.
    """
    stop = asyncio.Event()

    async def slow(frames: Frames) -> Frames:
        yield await anext(frames)
        yield await anext(frames)
        await stop.wait()

    async with decode_end(LARGE, 128, intercept=intercepted(slow)) as decode:
        async with sender_of(MemoryFile(LARGE, 128), timeout_s=1.0) as sender:
            push = sender.open(KEY, decode.grant(list(range(128)), transport=transport))
            push.send(0, list(range(128)))
            with pytest.raises(Unavailable):
                await push.commit(1, 128 * 16, 0.0)
            assert 0 < push.bytes_packed <= 16 * 2**20
        stop.set()
