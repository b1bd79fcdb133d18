"""Pushes that do not go well, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.transfer_ends import KEY, LAYOUT, DecodeEnd, MemoryFile, decode_end, sender_of

from kv_transfer.channels import message_bytes
from kv_transfer.push import Push
from kvrelay.errors import Cancelled, DataLoss, FailedPrecondition, Unavailable, Unimplemented
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import add_kv_transfer_servicer, pb

TRANSPORTS = ["memory", "shm", "grpc", "gloo"]


async def ended(push: Push) -> None:
    while push.error is None:
        await asyncio.sleep(0.001)


async def sent(push: Push, num_bytes: int) -> None:
    while push.bytes_packed < num_bytes:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_abort_in_mid_push_frees_both_sides(transport: str) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        target = decode.grant([1, 2, 3], transport=transport)
        push = sender.open(KEY, target)
        push.send(0, [5])
        await sent(push, LAYOUT.block_bytes)
        await push.abort()
        decode.leases.close(target.lease_id)
        assert [lease.lease_id for lease in decode.leases.release()] == [target.lease_id]
        assert isinstance(push.error, Cancelled)
        assert "without a commit" in push.error.message
        assert decode.committed == []
        await push.abort()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_abort_before_anything_was_sent(transport: str) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1], transport=transport))
        await push.abort()
        assert isinstance(push.error, Cancelled)


async def test_abort_while_the_commit_waits() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2]))
        push.send(0, [5, 6])
        commit = asyncio.create_task(push.commit(1, 8, 0.0))
        await asyncio.sleep(0)
        await push.abort()
        with pytest.raises(Cancelled):
            await commit
        assert decode.committed == []


async def test_a_cancelled_commit_leaves_the_push_to_be_aborted() -> None:
    async with (
        silent_server() as (address, decode),
        sender_of(MemoryFile(), timeout_s=0.3) as sender,
    ):
        push = sender.open(KEY, decode.grant([1], address=address))
        push.send(0, [5])
        commit = asyncio.create_task(push.commit(1, 4, 0.0))
        await sent(push, LAYOUT.block_bytes)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        await push.abort()
        assert isinstance(push.error, Unavailable)


async def test_a_refusal_shows_before_the_commit() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        target = decode.grant([1])
        decode.leases.close(target.lease_id)
        push = sender.open(KEY, target)
        await ended(push)
        push.send(0, [5])
        with pytest.raises(FailedPrecondition, match=f"{decode.address}: lease 1 has ended"):
            await push.commit(1, 4, 0.0)
        await push.abort()


async def test_the_receivers_objection_to_the_commit_is_raised() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2]))
        push.send(0, [5])
        with pytest.raises(DataLoss, match="1 of 2 blocks are missing"):
            await push.commit(1, 8, 0.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_bytes_that_are_not_what_their_digest_says_are_data_loss(transport: str) -> None:
    """This sender gives no digests, and the receiver wants them."""
    async with decode_end() as decode, sender_of(MemoryFile(), digests=False) as sender:
        push = sender.open(KEY, decode.grant([1], transport=transport))
        push.send(0, [5])
        async with asyncio.timeout(30):
            # gRPC can lose the reason of a refusal that comes while a frame is being written, here
            # the commit.
            while push.error is None:
                await asyncio.sleep(0.005)
        with pytest.raises(DataLoss, match="frame 0 has 0 digests for 1 blocks"):
            await push.commit(1, 4, 0.0)
        assert decode.committed == []


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_push_that_failed_does_not_spoil_the_next(transport: str) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        for key in (("first", 0), ("second", 0)):
            push = sender.open(key, decode.grant([1, 2], key=key, transport=transport))
            push.send(0, [5, 6] if key == ("second", 0) else [5])
            if key == ("first", 0):
                with pytest.raises(DataLoss):
                    await push.commit(1, 8, 0.0)
            else:
                await push.commit(1, 8, 0.0)
        assert decode.arena.block(2) == source.block(6)


async def test_a_refusal_is_what_a_peer_that_did_not_join_the_group_is_asked_for() -> None:
    async with decode_end() as decode, sender_of(MemoryFile(), timeout_s=0.5) as sender:
        target = decode.grant([1], transport="gloo")
        decode.leases.close(target.lease_id)
        push = sender.open(KEY, target)
        push.send(0, [5])
        with pytest.raises(FailedPrecondition, match="lease 1 has ended"):
            await push.commit(1, 4, 0.0)


async def test_a_transport_that_was_asked_for_does_not_fall_back() -> None:
    source = MemoryFile()
    source.nonce += 1
    async with decode_end() as decode, sender_of(source) as sender:
        push = sender.open(KEY, decode.grant([1], transport="shm"))
        push.send(0, [5])
        with pytest.raises(Unimplemented, match="does not contain arena"):
            await push.commit(1, 4, 0.0)


async def test_memory_is_refused_when_the_worker_is_in_another_process() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        target = decode.grant([1], transport="memory", worker_id="in another process")
        with pytest.raises(Unimplemented, match="not in one process"):
            sender.open(KEY, target)


async def test_closing_the_sender_ends_its_pushes() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2]))
        push.send(0, [5])
        await sent(push, LAYOUT.block_bytes)
        await sender.close()
        await ended(push)
        with pytest.raises(Unavailable, match="closed"):
            await push.commit(1, 8, 0.0)
        assert not sender.channels._open, "no push opens a connection again"


async def test_nobody_at_the_address_is_unavailable() -> None:
    async with decode_end() as decode:
        target = decode.grant([1])
    async with sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, target)
        push.send(0, [5])
        with pytest.raises(Unavailable, match="cannot connect"):
            await push.commit(1, 4, 0.0)


async def test_a_broken_connection_is_replaced() -> None:
    source = MemoryFile()
    async with sender_of(source) as sender:
        async with decode_end() as decode:
            port = int(decode.address.rpartition(":")[2])
            target = decode.grant([1])
        push = sender.open(KEY, target)
        with pytest.raises(Unavailable):
            await push.commit(1, 4, 0.0)
        async with decode_end(port=port) as decode:
            push = sender.open(KEY, decode.grant([1]))
            push.send(0, [5])
            await push.commit(1, 4, 0.0)
            assert decode.arena.block(1) == source.block(5)


class Silent:
    """Takes the push, then reads nothing more."""

    async def Push(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.KvReceipt:
        await anext(request_iterator)
        await context.send_initial_metadata(())
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, DecodeEnd]]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", message_bytes(LARGE))])
    add_kv_transfer_servicer(Silent().Push, None, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with decode_end() as decode:
            yield f"127.0.0.1:{port}", decode
    finally:
        await server.stop(None)


LARGE = KvLayout((LayerKv(8, 128, 128),) * 4, block_size=16, dtype="float32")  # 512 KiB a block


async def test_what_a_slow_receiver_has_not_taken_is_not_in_memory() -> None:
    """Of 64 MiB, only what the flow control lets pass is ever copied out of the arena."""
    async with (
        silent_server() as (address, decode),
        sender_of(MemoryFile(LARGE, 128), timeout_s=1.0) as sender,
    ):
        push = sender.open(KEY, decode.grant(list(range(128)), address=address))
        push.send(0, list(range(128)))
        with pytest.raises(Unavailable, match="took no bytes for 1 s"):
            await push.commit(1, 128 * 16, 0.0)
        assert 0 < push.bytes_packed <= 16 * 2**20


async def test_a_lost_answer_is_asked_for_again() -> None:
    """The receiver commits, but its answer does not arrive."""
    source = MemoryFile()
    lost = 0
    async with sender_of(source) as sender:

        async def lose_first_answer(  # type: ignore[no-untyped-def]
            continuation, details
        ):
            handler = await continuation(details)

            async def push(
                frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext
            ) -> pb.KvReceipt:
                nonlocal lost
                receipt = await handler.stream_unary(frames, context)
                if not lost:
                    lost += 1
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
                return receipt

            return grpc.stream_unary_rpc_method_handler(
                push, handler.request_deserializer, handler.response_serializer
            )

        async with decode_end(intercept=lose_first_answer) as decode:
            push = sender.open(KEY, decode.grant([1, 2]))
            push.send(0, [5, 6])
            handoff = await push.commit(1, 8, 0.0)
            assert (lost, handoff.blocks, len(decode.committed)) == (1, 2, 1)
            assert push.error is None
            assert decode.arena.block(2) == source.block(6)


async def test_a_push_whose_connection_is_closed_repeats_its_commit() -> None:
    """gRPC cancels its call then. It says nothing about the decode worker, which may have taken
    over.
    """
    async with decode_end() as decode, sender_of(MemoryFile(), timeout_s=30.0) as sender:
        receive, committed = decode.receiver._receive, asyncio.Event()

        async def late(frames: Any, context: Any) -> Any:
            receipt = await receive(frames, context)
            if not committed.is_set():
                committed.set()
                await asyncio.sleep(3600)
            return receipt

        decode.receiver._receive = late  # type: ignore[method-assign]
        target = decode.grant([1, 2, 3])
        push = sender.open(KEY, target)
        push.send(0, [5, 6, 7])
        commit = asyncio.create_task(push.commit(1, 12, 0.0))
        await committed.wait()
        channel = sender.channels.get(target.address)
        sender.channels.retire(target.address, channel, 0)
        assert (await commit).blocks == 3
        assert decode.committed
