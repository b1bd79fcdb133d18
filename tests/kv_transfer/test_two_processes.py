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
from transfer_ends import KEY, LAYOUT, MemoryFile, sender_of

from kv_transfer.transports.shm import SegmentCache
from kvrelay.errors import Unavailable, Unimplemented
from kvrelay.messages import HandoffTarget
from kvrelay.wire.transfer import SharedSegment

TESTS = Path(__file__).parent.parent
BLOCKS = [9, 3, 4, 20]


@contextmanager
def peer(transport: str) -> Iterator[tuple[subprocess.Popen[str], HandoffTarget]]:
    command = [sys.executable, str(TESTS / "transfer_peer.py"), transport, *map(str, BLOCKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, HandoffTarget(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("requested", "transport", "why"),
    [
        ("auto", "shm", "same host"),
        ("shm", "shm", "asked for"),
        ("grpc", "grpc", "asked for"),
        ("gloo", "gloo", "asked for"),
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
        assert [process.stdout.readline().strip() for _ in BLOCKS] == [source.block(n).hex() for n in (1, 2, 31, 0)]


async def test_memory_is_refused_between_processes() -> None:
    with peer("memory") as (_, target):
        async with sender_of(MemoryFile()) as sender:
            with pytest.raises(Unimplemented, match="not in one process"):
                sender.open(KEY, target)


@pytest.mark.parametrize("transport", ["shm", "grpc", "gloo"])
async def test_a_receiver_that_is_killed_in_mid_push_is_unavailable(transport: str) -> None:
    with peer(transport) as (process, target):
        async with sender_of(MemoryFile(), patience=2.0) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            while not push.bytes_packed:
                await asyncio.sleep(0.001)
            process.kill()
            process.wait()
            push.send(2, [3, 4])
            with pytest.raises(Unavailable):
                await push.commit(42, 4 * LAYOUT.block_size, 0.0)
            assert isinstance(push.error, Unavailable)


@pytest.mark.parametrize("transport", ["shm", "grpc", "gloo"])
async def test_a_receiver_that_is_frozen_is_unavailable(transport: str) -> None:
    with peer(transport) as (process, target):
        async with sender_of(MemoryFile(), patience=0.3) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            while not push.bytes_packed:
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGSTOP)
            push.send(2, [3, 4])
            with pytest.raises(Unavailable, match=r"for 0\.3 s"):
                await push.commit(42, 4 * LAYOUT.block_size, 0.0)


@pytest.mark.parametrize("transport", ["shm", "grpc", "gloo"])
async def test_a_push_to_a_dead_receiver_can_be_aborted(transport: str) -> None:
    with peer(transport) as (process, target):
        async with sender_of(MemoryFile(), patience=0.3) as sender:
            push = sender.open(KEY, target)
            push.send(0, [1, 2])
            process.kill()
            process.wait()
            await push.abort()


def test_the_mapping_of_a_dead_senders_arena_is_let_go() -> None:
    """A process stands in for the sender: its memory file is seen through its /proc, and gone with it."""
    source, arena, other = MemoryFile(seed=2), MemoryFile(), MemoryFile(seed=3)
    cache = SegmentCache()
    assert source.fd is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[source.fd]) as process:
        segment = SharedSegment(process.pid, source.fd, source.buffer.numel(), source.nonce)
        cache.accept(segment, arena, digests=True)
        cache.accept(segment, arena, digests=True)
        assert len(cache) == 1
    assert other.fd is not None
    cache.accept(SharedSegment(os.getpid(), other.fd, other.buffer.numel(), other.nonce), arena, digests=True)
    assert len(cache) == 1


def test_a_mapping_cannot_be_written_to() -> None:
    source = MemoryFile()
    assert source.fd is not None
    inbound = SegmentCache().accept(
        SharedSegment(os.getpid(), source.fd, source.buffer.numel(), source.nonce), MemoryFile(), digests=True
    )
    with pytest.raises(ValueError, match="read-only"):
        inbound.source[0] = 1
