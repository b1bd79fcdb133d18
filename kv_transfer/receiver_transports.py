"""A receiver's half of every transport, with the connections that pushes reuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.transports import Inbound, memory, vllm_nixl
from kv_transfer.transports.cuda_ipc import CudaIpcInbound
from kv_transfer.transports.group_inbound import ReceiverGroups
from kv_transfer.transports.grpc import GrpcInbound
from kv_transfer.transports.nixl import NixlReader
from kv_transfer.transports.shm import SegmentCache
from kv_transfer.transports.vllm_nixl import VllmInbound
from kvrelay.errors import Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvOpen, RemoteArena


class ReceiverTransports:
    """`device` is that of the receiver's arena. Groups and NIXL listen on `host`. in_vllm: vLLM
    reads the KV itself, and no other transport is accepted.
    """

    def __init__(
        self, device: torch.device, host: str, timeout_s: float, *, in_vllm: bool = False
    ) -> None:
        self._in_vllm = in_vllm
        self._device = device
        self._segments = SegmentCache()
        self._groups = ReceiverGroups(host, timeout_s)
        self._nixl = NixlReader(device, host, timeout_s)

    def drop_dead(self) -> None:
        """Gives back what senders on this host left mapped when they ended."""
        self._segments.drop_dead()

    @asynccontextmanager
    async def accept(self, opening: KvOpen, theirs: KvLayout) -> AsyncIterator[Inbound]:
        """The receiving half for one push. After an exit without an exception, its connections are
        reused.
        """
        if self._in_vllm != (opening.transport == vllm_nixl.NAME):
            raise Unimplemented(f"transport {opening.transport!r} is not supported by this worker")
        match opening.transport:
            case vllm_nixl.NAME:
                yield VllmInbound()
            case "grpc":
                yield GrpcInbound(theirs)
            case "memory" if opening.segment is not None:
                yield memory.accept(opening.segment, theirs)
            case "shm" if opening.segment is not None:
                with self._segments.lend(opening.segment, theirs) as mapped:
                    yield mapped
            case "nixl" if opening.arena is not None:
                with self._nixl.lend(opening.arena, theirs) as reading:
                    await in_thread(reading.open)
                    yield reading
            case "cuda_ipc" if opening.arena is not None:
                async with _mapped(opening.arena, theirs, self._device) as inbound:
                    yield inbound
            case "gloo" | "nccl" as backend:
                rendezvous = opening.rendezvous
                with self._groups.lend(backend, rendezvous, theirs, self._device) as joined:
                    yield joined
            case transport:
                raise Unimplemented(f"transport {transport!r} is not supported by this worker")


@asynccontextmanager
async def _mapped(
    arena: RemoteArena, theirs: KvLayout, device: torch.device
) -> AsyncIterator[Inbound]:
    """Maps an arena on another GPU of this host for one push."""
    inbound = CudaIpcInbound(arena, theirs, device)
    try:
        await in_thread(inbound.open)
        yield inbound
    finally:
        await in_thread(inbound.close)
