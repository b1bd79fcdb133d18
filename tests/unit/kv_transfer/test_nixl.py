"""Real agents of NIXL, within this process and between two, on the host's memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, needs_nixl, sender_of

from kv_transfer.sender import Sender
from kv_transfer.transports import nixl
from kv_transfer.transports.nixl import NixlReader
from kv_transfer.transports.nixl_agent import NixlAgent
from kvrelay.errors import DataLoss, Unavailable, Unimplemented
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import KvBlocks, RemoteArena

TESTS = Path(__file__).parents[2]
BIG = KvLayout((LayerKv(4, 64, 64),) * 4, block_size=32, dtype="float32")  # 256 KiB a block


async def hand_over(sender: Sender, decode: Any, key: tuple[str, int], shift: int) -> None:
    """Ten blocks, scattered on both sides, in runs of three."""
    sources = [(n * 3 + shift) % 32 for n in range(10)]
    targets = [n * 2 + shift for n in range(10)]
    push = sender.open(key, decode.grant(targets, key=key, transport="nixl"))
    for first in range(0, 10, 3):
        push.send(first, sources[first : first + 3])
        await asyncio.sleep(0)
    handoff = await push.commit(1, 10 * sender.arena.layout.block_size, 0.0)
    assert (handoff.transport, handoff.blocks) == ("nixl", 10)
    assert isinstance(sender.arena, MemoryFile)
    assert [decode.arena.block(n) for n in targets] == [sender.arena.block(n) for n in sources]


@needs_nixl
async def test_kv_arrives_byte_for_byte_again_and_again_and_two_at_once() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        for n in range(3):
            await hand_over(sender, decode, (f"r{n}", 0), n)
        await asyncio.gather(*(hand_over(sender, decode, (f"at once {n}", 0), n) for n in range(2)))
        assert len(decode.committed) == 5
        decode.leases.check_integrity()


@needs_nixl
async def test_more_than_a_frame_arrives() -> None:
    source = MemoryFile(BIG, 80)
    async with (
        decode_end(BIG, 80, layout_hash=BIG.hash("test")) as decode,
        sender_of(source, layout_hash=BIG.hash("test")) as sender,
    ):
        push = sender.open(KEY, decode.grant(list(range(80)), transport="nixl"))
        push.send(0, list(reversed(range(80))))
        handoff = await push.commit(1, 80 * 32, 0.0)
        assert handoff.bytes == 80 * BIG.block_bytes
        assert all(decode.arena.block(n) == source.block(79 - n) for n in range(80))


@needs_nixl
async def test_blocks_of_another_size_arrive_too() -> None:
    double = KvLayout(LAYOUT.layers, 2 * LAYOUT.block_size, LAYOUT.dtype)
    source = MemoryFile()
    async with (
        decode_end(double, layout_hash=double.hash("test")) as decode,
        sender_of(source) as sender,
    ):
        push = sender.open(KEY, decode.grant([7], transport="nixl"))
        push.send(0, [5, 2])
        await push.commit(1, 8, 0.0)
        k = LAYOUT.region_block_bytes[0]
        assert decode.arena.block(7)[: 2 * k] == source.block(5)[:k] + source.block(2)[:k]


@needs_nixl
async def test_what_changed_on_the_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    read = NixlReader.read

    def spoil(*args: Any) -> torch.Tensor:
        memory = read(*args)
        memory[5] ^= 1
        return memory

    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        with monkeypatch.context() as patched:
            patched.setattr(NixlReader, "read", spoil)
            push = sender.open(KEY, decode.grant([1, 2], transport="nixl"))
            push.send(0, [3, 4])
            with pytest.raises(DataLoss, match="arrived with digest"):
                await push.commit(1, 8, 0.0)
        assert decode.committed == []
        await hand_over(sender, decode, ("next", 0), 1)


@needs_nixl
async def test_a_push_can_be_aborted_and_the_next_one_arrives() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1, 2, 30], transport="nixl"))
        push.send(0, [3, 4])
        while not push.bytes_packed:
            await asyncio.sleep(0.001)
        await push.abort()
        while decode.receiver.under_way:
            await asyncio.sleep(0.001)
        assert decode.committed == []
        await hand_over(sender, decode, ("next", 0), 0)


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], RemoteArena]]:
    command = [sys.executable, "-m", "support.nixl_sender"]
    with subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            remote = json.loads(process.stdout.readline())
            yield process, RemoteArena(**{**remote, "access": bytes.fromhex(remote["access"])})
        finally:
            process.kill()


def frame(blocks: list[int]) -> KvBlocks:
    return KvBlocks(
        0, 0, len(blocks), 0, 2, len(blocks) * LAYOUT.block_bytes, source_blocks=tuple(blocks)
    )


def read(reader: NixlReader, arena: RemoteArena, block: int) -> bytes:
    with reader.lend(arena, LAYOUT) as inbound:
        inbound.open()
        source = inbound.source(frame([block]))
        assert not isinstance(source.data, torch.Tensor)
        return source.data[: LAYOUT.block_bytes].tobytes()


@needs_nixl
def test_a_dead_sender_is_unavailable_and_the_next_one_is_read() -> None:
    reader = NixlReader(torch.device("cpu"), "127.0.0.1", timeout_s=5.0)
    expected = MemoryFile()
    with served() as (process, arena):
        assert read(reader, arena, 3) == expected.block(3)
        process.kill()
        process.wait()
        with pytest.raises(Unavailable, match="cannot be read"):
            read(reader, arena, 3)
        assert reader.known == 0
    with served() as (_, arena):
        assert read(reader, arena, 4) == expected.block(4)
        assert reader.known == 1


@needs_nixl
def test_a_sender_that_is_frozen_costs_timeout_s_and_no_more() -> None:
    reader = NixlReader(torch.device("cpu"), "127.0.0.1", timeout_s=0.3)
    with served() as (process, arena):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"in 0\.3 s"):
            read(reader, arena, 3)
        with served() as (_, other):
            assert read(reader, other, 4) == MemoryFile().block(4)


@needs_nixl
def test_what_is_no_arena_is_refused() -> None:
    reader = NixlReader(torch.device("cpu"), "127.0.0.1", timeout_s=1.0)
    size = LAYOUT.arena_bytes(32)
    with (
        pytest.raises(Unimplemented, match="not one that mine can read from"),
        reader.lend(RemoteArena(b"no metadata", 0, size), LAYOUT) as inbound,
    ):
        inbound.open()
    with (
        pytest.raises(Unimplemented, match="bytes does not match the layout"),
        reader.lend(RemoteArena(b"", 0, 7), LAYOUT),
    ):
        pass
    with (
        pytest.raises(DataLoss, match="outside"),
        reader.lend(RemoteArena(b"", 0, size), LAYOUT) as inbound,
    ):
        inbound.source(frame([32]))


@needs_nixl
def test_it_listens_on_the_loopback_device_only() -> None:
    with served() as (process, _):
        inodes = set()
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        listening = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                (
                    _,
                    local,
                    _,
                    state,
                    *_,
                ) = fields = line.split()
                if state == "0A" and fields[9] in inodes:
                    listening.append(local.partition(":")[0])
        assert listening == ["0100007F"]  # 127.0.0.1, little endian


class RecordingAgent:
    """Counts the registrations of an agent; needs no NIXL."""

    def __init__(self) -> None:
        self.registered = 0

    def register(self, memory: torch.Tensor) -> None:
        self.registered += 1

    def deregister(self, memory: torch.Tensor) -> None:
        self.registered -= 1


def test_idle_memory_is_bounded() -> None:
    reader = NixlReader(torch.device("cpu"), "127.0.0.1", timeout_s=1.0)
    agent = RecordingAgent()
    reader._made = cast(NixlAgent, agent)
    taken = [reader._take(1, -1) for _ in range(3 * nixl._MAX_IDLE)]
    assert agent.registered == len(taken)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(reader.give_back, taken))
    assert agent.registered == len(reader._idle) == nixl._MAX_IDLE
    reader._take(1, -1)
    assert agent.registered == nixl._MAX_IDLE, "idle memory is used again"


async def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = sender.open(KEY, decode.grant([1], transport="nixl"))
        push.send(0, [1])
        with pytest.raises(Unimplemented, match=r"pip install '\.\[nixl\]' in a clone"):
            await push.commit(1, 4, 0.0)
        with (
            pytest.raises(Unimplemented, match=r"pip install '\.\[nixl\]' in a clone"),
            NixlReader(torch.device("cpu"), "127.0.0.1", 1.0).lend(
                RemoteArena(b"", 0, LAYOUT.arena_bytes(32)), LAYOUT
            ) as inbound,
        ):
            inbound.open()
