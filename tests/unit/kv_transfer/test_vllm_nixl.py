"""Hand-offs of KV that one vLLM reads from another: only the commit travels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transfer_ends import KEY, DecodeEnd, MemoryFile, decode_end, sender_of

from kv_transfer.lease import Lease
from kv_transfer.transport_selection import TRANSPORTS, choose_transport
from kv_transfer.transports.vllm_nixl import VllmInbound
from kv_transfer.vllm_blocks_check import check_vllm_blocks
from kvrelay.errors import DataLoss, FailedPrecondition, Internal, Unimplemented
from kvrelay.wire.transfer import KvBlocks, VllmBlocks

BLOCKS = VllmBlocks(
    engine_id="5b0d71a8-0f6b-4f8e-9d36-0f2a0d8c8d11",
    request_id="s1-0123abcd",
    host="127.0.0.1",
    port=5600,
    blocks=(7, 3, 9),
    expires_at=120.5,
    held_s=4.0,
)
NUM_TOKENS = 10


class Reads:
    """A vLLM that reads when it is told to."""

    def __init__(self) -> None:
        self.expected: list[tuple[Lease, VllmBlocks]] = []
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def expect(self, lease: Lease, blocks: VllmBlocks) -> Awaitable[int]:
        self.expected.append((lease, blocks))
        return self.finished


async def hand_over(decode: DecodeEnd, in_vllm: VllmBlocks | None = BLOCKS) -> Any:
    target = decode.grant([4, 5, 6], transport="vllm-nixl")
    async with sender_of(MemoryFile(), in_vllm=True) as sender:
        push = sender.open(KEY, target)
        try:
            return await push.commit(42, NUM_TOKENS, 5.0, in_vllm)
        finally:
            await push.abort()


async def test_the_receipt_follows_the_read_and_says_what_was_read() -> None:
    reads = Reads()
    async with decode_end(vllm_reads=reads) as decode:
        running = asyncio.create_task(hand_over(decode))
        while not decode.committed:
            assert not running.done()
            await asyncio.sleep(0)
        ((lease, first_token, num_tokens),) = decode.committed
        assert (first_token, num_tokens) == (42, NUM_TOKENS)
        assert reads.expected == [(lease, BLOCKS)]
        reads.finished.set_result(2)
        handoff = await running
    assert (handoff.transport, handoff.blocks) == ("vllm-nixl", 2)
    assert handoff.bytes == 2 * handoff.block_bytes


async def test_a_repeated_commit_gets_its_receipt_at_once() -> None:
    """The sender waits for a receipt no longer than for any other answer."""
    reads = Reads()
    async with decode_end(vllm_reads=reads) as decode:
        target = decode.grant([4, 5, 6], transport="vllm-nixl")
        async with sender_of(MemoryFile(), in_vllm=True, timeout_s=0.2) as sender:
            handoff = await sender.open(KEY, target).commit(42, NUM_TOKENS, 5.0, BLOCKS)
        assert len(decode.committed) == len(reads.expected) == 1
    assert handoff.blocks == 3


@pytest.mark.parametrize("in_vllm", [None, replace(BLOCKS, port=0), replace(BLOCKS, blocks=(7, 3))])
async def test_a_commit_that_vllm_cannot_read_is_refused(in_vllm: VllmBlocks | None) -> None:
    async with decode_end(vllm_reads=Reads()) as decode:
        with pytest.raises(DataLoss):
            await hand_over(decode, in_vllm)
        assert not decode.committed


async def test_a_stale_epoch_is_refused() -> None:
    async with decode_end(vllm_reads=Reads()) as decode:
        target = decode.grant([4, 5, 6], transport="vllm-nixl")
        async with sender_of(MemoryFile(), in_vllm=True) as sender:
            push = sender.open(KEY, replace(target, epoch=target.epoch - 1))
            with pytest.raises(FailedPrecondition, match="epoch"):
                await push.commit(42, NUM_TOKENS, 5.0, BLOCKS)
            assert not push.may_be_taken


async def test_a_worker_without_the_transport_refuses_it() -> None:
    """As do builds from before it."""
    async with decode_end() as decode:
        with pytest.raises(Unimplemented, match="'vllm-nixl' is not supported by this worker"):
            await hand_over(decode)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_a_worker_with_the_transport_takes_no_other(transport: str) -> None:
    async with (
        decode_end(vllm_reads=Reads()) as decode,
        sender_of(MemoryFile()) as sender,
    ):
        push = sender.open(KEY, decode.grant([4], transport=transport))
        push.send(0, [1])
        with pytest.raises(Unimplemented, match="is not supported by this worker"):
            await push.commit(42, 4, 5.0)


async def test_no_frame_carries_blocks() -> None:
    async with decode_end(vllm_reads=Reads()) as decode:
        target = decode.grant([4, 5, 6], transport="vllm-nixl")
        async with sender_of(MemoryFile(), in_vllm=True) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1])
            with pytest.raises(Internal, match="vllm-nixl sends no blocks"):
                await push.commit(42, NUM_TOKENS, 5.0, BLOCKS)
        assert not decode.committed
    with pytest.raises(DataLoss, match="frame 0 brings blocks"):
        VllmInbound().source(KvBlocks(0, 0, 1, 0, 2, 64))


@pytest.mark.parametrize("requested", ["auto", *TRANSPORTS])
@pytest.mark.parametrize("in_vllm", [False, True])
def test_the_worker_and_the_router_need_the_same_configuration(
    requested: str, *, in_vllm: bool
) -> None:
    def choose() -> tuple[str, str]:
        return choose_transport(
            requested,
            same_process=True,
            same_host=True,
            device="cuda" if requested == "nccl" else "cpu",
            target_device="cuda" if requested == "nccl" else "cpu",
            in_vllm=in_vllm,
        )

    if requested == "cuda_ipc" and not in_vllm:
        return
    if (requested == "vllm-nixl") == in_vllm:
        assert choose()[0] == ("memory" if requested == "auto" else requested)
        return
    with pytest.raises(Unimplemented, match="start the workers again"):
        choose()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine_id": ""}, "none of vLLM's"),
        ({"engine_id": "a" * 65}, "none of vLLM's"),
        ({"request_id": "s1:2"}, "none of vLLM's"),
        ({"request_id": "s1,s2"}, "none of vLLM's"),
        ({"request_id": "s1\n"}, "none of vLLM's"),
        ({"host": ""}, "no address"),
        ({"host": "a b"}, "no address"),
        ({"host": "tcp://x"}, "no address"),
        ({"port": 0}, "no address"),
        ({"port": 65536}, "no address"),
        ({"held_s": 0.0}, "allowed are"),
        ({"held_s": 1e9}, "allowed are"),
        ({"held_s": float("nan")}, "allowed are"),
        ({"expires_at": float("inf")}, "allowed are"),
        ({"blocks": (7, 3)}, "2 different blocks for 3"),
        ({"blocks": (7, 3, 7)}, "2 different blocks for 3"),
        ({"blocks": (7, 3, 0)}, "not one of vLLM's"),
        ({"blocks": (7, 3, -1)}, "not one of vLLM's"),
    ],
)
def test_what_cannot_come_from_vllm_is_refused(changes: dict[str, Any], says: str) -> None:
    check_vllm_blocks(BLOCKS, 3)
    with pytest.raises(DataLoss, match=says):
        check_vllm_blocks(replace(BLOCKS, **changes), 3)


TEXT = st.text(max_size=8)
NUMBERS = st.integers(-(2**31), 2**31 - 1)


@given(
    st.builds(
        VllmBlocks,
        TEXT,
        TEXT,
        TEXT,
        NUMBERS,
        st.lists(NUMBERS, max_size=4).map(tuple),
        st.floats(),
        st.floats(),
    )
)
def test_no_value_has_another_error(given_blocks: VllmBlocks) -> None:
    try:
        check_vllm_blocks(given_blocks, 2)
    except DataLoss:
        return
    assert len(set(given_blocks.blocks)) == 2
