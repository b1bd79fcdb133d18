"""What cuda_ipc does around CUDA, which a stand-in on the host plays: no GPU is needed, and none is
tried.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, ClassVar

import pytest
import torch
from support.transfer_ends import KEY, LAYOUT, MemoryFile, decode_end, sender_of

from kv_transfer.blocks import cuda_memory
from kv_transfer.blocks.arena import places_in
from kv_transfer.blocks.cuda_memory import HANDLE_BYTES, CudaMemory
from kv_transfer.blocks.digest import MULTILINEAR, multilinear_digests
from kv_transfer.push import Push
from kv_transfer.retry_policy import PushAttempt
from kv_transfer.transports import cuda_ipc, named
from kv_transfer.transports.cuda_ipc import CudaIpcInbound
from kvrelay.errors import DataLoss, Unavailable, Unimplemented
from kvrelay.wire.transfer import KvBlocks, RemoteArena

CPU = torch.device("cpu")
SIZE = LAYOUT.arena_bytes(32)


class HostMemory:
    """Handles to this process's own memory; an arena begins 48 bytes into its allocation."""

    opened: ClassVar[list[int]] = []
    refuses: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._stream: list[tuple[int, int, int]] = []

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - 48).to_bytes(8, "little").ljust(HANDLE_BYTES, b"\xff"), 48

    def open(self, handle: bytes) -> int:
        if self.refuses:
            raise Unimplemented("the two GPUs cannot reach each other")
        address = int.from_bytes(handle[:8], "little")
        self.opened.append(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._stream.append((target, source, num_bytes))

    def settle(self) -> None:
        for copy in self._stream:
            ctypes.memmove(*copy)
        self._stream.clear()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[HostMemory]:
    """Arenas on the host that go for such on GPUs."""
    monkeypatch.setattr(HostMemory, "opened", [])
    monkeypatch.setattr(HostMemory, "refuses", False)
    monkeypatch.setattr(cuda_ipc, "CudaMemory", HostMemory)
    monkeypatch.setattr(cuda_ipc, "digest_kind", lambda arena: MULTILINEAR)
    monkeypatch.setattr(
        named,
        "digests_of",
        lambda arena, blocks, layers: multilinear_digests(
            arena.buffer, places_in(arena, layers), blocks
        ),
    )
    return HostMemory


def frame(blocks: list[int], **changes: Any) -> KvBlocks:
    return KvBlocks(
        0,
        0,
        len(blocks),
        0,
        2,
        len(blocks) * LAYOUT.block_bytes,
        source_blocks=tuple(blocks),
        **changes,
    )


async def test_kv_arrives_byte_for_byte_and_nothing_stays_open(cuda: type[HostMemory]) -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        for shift in range(2):
            key, targets = (f"r{shift}", 0), [9 + shift, 3, 4, 20]
            push = Push(
                sender,
                key,
                decode.grant(targets, key=key, transport="cuda_ipc"),
                PushAttempt("cuda_ipc", "asked for"),
            )
            push.send(0, [1, 2])
            push.send(2, [31, 0])
            handoff = await push.commit(42, 4 * LAYOUT.block_size, 0.0)
            assert (handoff.transport, handoff.bytes) == ("cuda_ipc", 4 * LAYOUT.block_bytes)
            assert [decode.arena.block(n) for n in targets] == [
                source.block(n) for n in (1, 2, 31, 0)
            ]
            assert cuda.opened == []


async def test_what_changed_after_it_was_digested_is_not_taken(
    cuda: type[HostMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemoryFile()
    settle = cuda.settle

    def spoil(self: HostMemory) -> None:
        source.buffer[LAYOUT.region_block_bytes[0] * 5] ^= 1
        settle(self)

    monkeypatch.setattr(cuda, "settle", spoil)
    async with decode_end() as decode, sender_of(source) as sender:
        push = Push(
            sender,
            KEY,
            decode.grant([1], transport="cuda_ipc"),
            PushAttempt("cuda_ipc", "asked for"),
        )
        push.send(0, [5])
        with pytest.raises(DataLoss, match="arrived with digest"):
            await push.commit(1, 4, 0.0)
        assert (decode.committed, cuda.opened) == ([], [])


async def test_an_aborted_push_closes_what_it_opened(cuda: type[HostMemory]) -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = Push(
            sender,
            KEY,
            decode.grant([1, 2], transport="cuda_ipc"),
            PushAttempt("cuda_ipc", "asked for"),
        )
        push.send(0, [3])
        while not cuda.opened:
            await asyncio.sleep(0.001)
        await push.abort()
        while decode.receiver.under_way or cuda.opened:
            await asyncio.sleep(0.001)
        assert decode.committed == []


async def test_auto_goes_on_to_grpc_where_gpus_do_not_reach_each_other(
    cuda: type[HostMemory],
) -> None:
    cuda.refuses = True
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        push = Push(
            sender,
            KEY,
            decode.grant([1], transport="auto"),
            PushAttempt("cuda_ipc", "GPUs of one host"),
        )
        push.send(0, [5])
        handoff = await push.commit(1, 4, 0.0)
        assert handoff.transport == "grpc"
        assert (
            handoff.why
            == f"cuda_ipc failed: {decode.address}: the two GPUs cannot reach each other"
        )
        assert decode.arena.block(1) == source.block(5)


def test_what_is_no_arena_is_refused(cuda: type[HostMemory]) -> None:
    handle = bytes(HANDLE_BYTES)
    with pytest.raises(Unimplemented, match="the handle of GPU memory has 3 bytes"):
        CudaIpcInbound(RemoteArena(b"abc", 0, SIZE, 0), LAYOUT, CPU)
    with pytest.raises(Unimplemented, match="bytes does not match the layout"):
        CudaIpcInbound(RemoteArena(handle, 0, SIZE + 1, 0), LAYOUT, CPU)
    inbound = CudaIpcInbound(RemoteArena(handle, 0, SIZE, 0), LAYOUT, CPU)
    inbound.open()
    with pytest.raises(DataLoss, match="outside of the arena"):
        inbound.source(frame([32]))
    inbound.close()
    inbound.close()
    assert cuda.opened == []


async def test_without_a_gpu_the_error_says_so() -> None:
    async with decode_end() as decode, sender_of(MemoryFile()) as sender:
        push = Push(
            sender,
            KEY,
            decode.grant([1], transport="cuda_ipc"),
            PushAttempt("cuda_ipc", "asked for"),
        )
        push.send(0, [1])
        with pytest.raises(Unimplemented, match="needs KV on a GPU, not on cpu"):
            await push.commit(1, 4, 0.0)


class Library:
    """libcudart and libcuda with one allocation at 0x1000 and, opened from elsewhere, one at
    0x9000.
    """

    def __init__(self) -> None:
        self.fails = ""
        self.calls: list[str] = []
        self.cudaGetErrorString = lambda code: b"invalid argument"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuMemGetAddressRange_v2":
                arguments[0]._obj.value = 0x1000
            elif name == "cudaIpcGetMemHandle":
                assert arguments[1].value == 0x1000
                arguments[0]._obj.reserved[:] = list(range(HANDLE_BYTES))
            elif name == "cudaIpcOpenMemHandle":
                assert bytes(arguments[1].reserved) == bytes(range(HANDLE_BYTES))
                arguments[0]._obj.value = 0x9000
            elif name == "cudaIpcCloseMemHandle":
                assert arguments[0].value == 0x9000
            elif name == "cudaSetDevice":
                assert arguments[0].value == 1
            return int(name == self.fails)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library, names = Library(), []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_memory.ctypes, "CDLL", lambda name: names.append(name) or library)
    assert CudaMemory(torch.device("cuda:1"))
    assert names == ["libcudart.so.13", "libcuda.so.1"]
    return library


def test_a_handle_is_of_the_whole_allocation(library: Library) -> None:
    memory = CudaMemory(torch.device("cuda:1"))
    handle, start = memory.export(0x1200)
    assert (handle, start) == (bytes(range(HANDLE_BYTES)), 0x200)
    assert memory.open(handle) == 0x9000
    memory.close(0x9000)
    assert library.calls[0] == "cudaSetDevice"


@pytest.mark.parametrize(
    ("fails", "error", "says"),
    [
        ("cudaSetDevice", Unimplemented, "no cuda:1"),
        ("cuMemGetAddressRange_v2", Unimplemented, "CUDA error 1"),
        ("cudaIpcGetMemHandle", Unimplemented, "cannot be shared: invalid argument"),
        ("cudaIpcOpenMemHandle", Unimplemented, "cannot be opened: invalid argument"),
        ("cudaIpcCloseMemHandle", Unavailable, "cannot be closed: invalid argument"),
    ],
)
def test_what_cuda_refuses_is_a_typed_error(
    library: Library, fails: str, error: type[Exception], says: str
) -> None:
    memory = CudaMemory(torch.device("cuda:1"))
    library.fails = fails
    with pytest.raises(error, match=says):
        memory.close(memory.open(memory.export(0x1200)[0]))
    assert ("cudaGetLastError" in library.calls) == fails.startswith(
        "cudaI"
    ) or fails == "cudaSetDevice"
