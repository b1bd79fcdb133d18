"""A sender here, a receiver in another process; and what is left when that one dies or freezes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, needs_nixl, sender_of

from kv_transfer.transports.shm import SegmentCache
from kvrelay.errors import Unavailable
from kvrelay.wire.transfer import SharedSegment
from kvrelay.worker_messages import HandoffTarget

TESTS = Path(__file__).parents[2]
BLOCKS = [9, 3, 4, 20]
TRANSPORTS = ["shm", "grpc", "gloo", pytest.param("nixl", marks=needs_nixl)]


@contextmanager
def peer(transport: str) -> Iterator[tuple[subprocess.Popen[str], HandoffTarget]]:
    command = [sys.executable, "-m", "support.transfer_peer", transport, *map(str, BLOCKS)]
    with subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, HandoffTarget(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("requested", "transport", "why"),
    [
        ("auto", "shm", "same host"),
        ("grpc", "grpc", "asked for"),
        ("gloo", "gloo", "asked for"),
        pytest.param("nixl", "nixl", "asked for", marks=needs_nixl),
    ],
)
async def test_kv_arrives_byte_for_byte(requested: str, transport: str, why: str) -> None:
    source = MemoryFile()
    with peer(requested) as (process, target):
        async with sender_of(source) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            push.send(2, [31, 0])
            handoff = await push.commit(42, 4 * LAYOUT.block_size, 0.0)
        assert (handoff.transport, handoff.why) == (transport, why)
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in BLOCKS] == [
            source.block(n).hex() for n in (1, 2, 31, 0)
        ]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_receiver_that_is_killed_in_mid_push_is_unavailable(transport: str) -> None:
    with peer(transport) as (process, target):
        async with sender_of(MemoryFile(), timeout_s=2.0) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            while not push.bytes_packed and not push.error:
                await asyncio.sleep(0.001)
            process.kill()
            process.wait()
            push.send(2, [3, 4])
            with pytest.raises(Unavailable):
                await push.commit(42, 4 * LAYOUT.block_size, 0.0)
            assert isinstance(push.error, Unavailable)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_receiver_that_is_frozen_is_unavailable(transport: str) -> None:
    # Its first push makes an agent, which takes about half a second
    timeout_s = 3.0 if transport == "nixl" else 0.3
    with peer(transport) as (process, target):
        async with sender_of(MemoryFile(), timeout_s=timeout_s) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            while not push.bytes_packed and not push.error:
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGSTOP)
            push.send(2, [3, 4])
            with pytest.raises(Unavailable, match=rf"{timeout_s:g} s|300ms"):
                await push.commit(42, 4 * LAYOUT.block_size, 0.0)


async def test_a_push_to_a_dead_receiver_can_be_aborted() -> None:
    with peer("shm") as (process, target):
        async with sender_of(MemoryFile(), timeout_s=0.3) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            process.kill()
            process.wait()
            await push.abort()


def segment_of(source: MemoryFile, pid: int) -> SharedSegment:
    assert source.fd is not None
    return SharedSegment(pid, source.fd, source.buffer.numel(), source.nonce)


def test_the_mapping_of_a_dead_senders_arena_is_let_go() -> None:
    """A process stands in for the sender: its memory file is seen through its /proc, and gone with
    it.
    """
    source, other = MemoryFile(seed=2), MemoryFile(seed=3)
    segments = SegmentCache()
    assert source.fd is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[source.fd]) as process:
        for _ in range(2):
            with segments.lend(segment_of(source, process.pid), LAYOUT):
                pass
        assert len(segments) == 1
    with segments.lend(segment_of(other, os.getpid()), LAYOUT):
        pass
    assert len(segments) == 1
    segments.drop_dead()
    assert len(segments) == 1


async def test_a_receiver_without_pushes_gives_a_dead_senders_memory_back() -> None:
    source = MemoryFile(seed=2)
    assert source.fd is not None
    async with decode_end() as decode:
        segments = decode.receiver._transports._segments
        sender = await asyncio.create_subprocess_exec(
            "cat", stdin=subprocess.PIPE, pass_fds=[source.fd]
        )
        with segments.lend(segment_of(source, sender.pid), LAYOUT):
            pass
        assert len(segments) == 1
        await sender.communicate(b"")
        decode.receiver.keep_house(100.0)
        assert len(segments) == 0


def test_a_mapping_is_for_reading_only() -> None:
    source = MemoryFile()
    segments = SegmentCache()
    with (
        segments.lend(segment_of(source, os.getpid()), LAYOUT) as inbound,
        pytest.raises(ValueError, match="read-only"),
    ):
        inbound.data[0] = 1
