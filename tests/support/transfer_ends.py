"""A memory file as an arena, and a pair of workers' transfer ends on one event loop."""

from __future__ import annotations

import fcntl
import importlib.util
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import torch

from kv_transfer.channels import message_bytes
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kv_transfer.transports.vllm_nixl import VllmReads
from kvrelay.clock import ManualClock
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import add_kv_transfer_servicer
from kvrelay.worker_messages import HandoffTarget

LAYOUT = KvLayout((LayerKv(2, 8, 8), LayerKv(1, 8, 4)), block_size=4, dtype="float32")
HASH = LAYOUT.hash("test")
KEY = ("request", 0)
SENDER = "prefill-0"

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="NIXL is not installed: pip install 'kvrelay[nixl]'",
)


class MemoryFile:
    """An arena of random bytes in a memory file of this process."""

    def __init__(
        self, layout: KvLayout = LAYOUT, num_blocks: int = 32, seed: int = 0, *, sealed: bool = True
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.nonce = secrets.randbits(63)
        size = layout.arena_bytes(num_blocks)
        self.fd: int | None = os.memfd_create(
            f"kvrelay-{self.nonce:x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        os.ftruncate(self.fd, size)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.buffer = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        self.shares: tuple[torch.Tensor, ...] = (self.buffer,)
        generator = torch.Generator().manual_seed(seed)
        self.buffer.copy_(torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8))

    def block(self, number: int) -> bytes:
        """The bytes of one block, region after region: the naive way that the plan is compared
        with.
        """
        assert 0 <= number < self.num_blocks
        parts, start = [], 0
        for size in self.layout.region_block_bytes:
            parts.append(
                self.buffer[start + number * size : start + (number + 1) * size].numpy().tobytes()
            )
            start += size * self.num_blocks
        return b"".join(parts)

    def __del__(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


@dataclass
class DecodeEnd:
    """A receiver on a real server, with a lease table that a test grants from."""

    arena: MemoryFile
    clock: ManualClock
    leases: LeaseTable
    receiver: Receiver
    address: str = ""
    worker_id: str = "decode-0"
    committed: list[tuple[Lease, int, int]] = field(default_factory=list)

    def grant(
        self,
        blocks: list[int],
        cached_blocks: int = 0,
        *,
        key: tuple[str, int] = KEY,
        transport: str = "grpc",
        worker_id: str = "",
        address: str = "",
        sender: str = SENDER,
        partial: bool = False,
    ) -> HandoffTarget:
        lease = self.leases.grant(
            key, blocks, cached_blocks, 10.0, self.clock.now(), partial=partial
        )
        capability = self.receiver.capability(lease, sender)
        return HandoffTarget(
            worker_id=worker_id or self.worker_id,
            address=address or self.address,
            epoch=self.leases.epoch,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_blocks=len(blocks),
            cached_tokens=cached_blocks * self.arena.layout.block_size,
            layout_hash=HASH,
            host_id=host_id(),
            transport=transport,
            capability=capability,
        )


class Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, intercept: Callable[..., Awaitable[Any]]) -> None:
        self._intercept = intercept

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return await self._intercept(continuation, handler_call_details)


@asynccontextmanager
async def decode_end(
    layout: KvLayout = LAYOUT,
    num_blocks: int = 32,
    *,
    layout_hash: str = HASH,
    digests: bool = True,
    port: int = 0,
    timeout_s: float = 10.0,
    intercept: Callable[..., Awaitable[Any]] | None = None,
    vllm_reads: VllmReads | None = None,
) -> AsyncIterator[DecodeEnd]:
    """`intercept(continuation, details)` stands before the receiver, as grpc.aio.ServerInterceptor
    does.
    """
    arena = MemoryFile(layout, num_blocks, seed=1)
    clock = ManualClock(1000.0)
    leases = LeaseTable(epoch=7)
    committed: list[tuple[Lease, int, int]] = []
    worker_id = f"decode-{secrets.token_hex(4)}"
    receiver = Receiver(
        arena,
        leases,
        worker_id=worker_id,
        model_id="test",
        layout_hash=layout_hash,
        on_commit=lambda lease, token, count: committed.append((lease, token, count)),
        clock=clock,
        digests=digests,
        timeout_s=timeout_s,
        vllm_reads=vllm_reads,
    )
    server = grpc.aio.server(
        interceptors=[Interceptor(intercept)] if intercept else [],
        options=[
            ("grpc.max_receive_message_length", message_bytes(layout)),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ],
    )
    add_kv_transfer_servicer(receiver.Push, None, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield DecodeEnd(arena, clock, leases, receiver, f"127.0.0.1:{port}", worker_id, committed)
    finally:
        await server.stop(None)


@asynccontextmanager
async def sender_of(
    arena: MemoryFile,
    *,
    layout_hash: str = HASH,
    timeout_s: float = 10.0,
    digests: bool = True,
    in_vllm: bool = False,
) -> AsyncIterator[Sender]:
    sender = Sender(
        arena,
        worker_id=SENDER,
        host_id=host_id(),
        model_id="test",
        layout_hash=layout_hash,
        clock=ManualClock(5.0),
        digests=digests,
        timeout_s=timeout_s,
        in_vllm=in_vllm,
    )
    try:
        yield sender
    finally:
        await sender.close()
