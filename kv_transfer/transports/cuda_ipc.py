"""Transport between GPUs of one host: the receiver maps the sender's arena and copies from GPU to
GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kv_transfer.blocks.arena import digest_kind
from kv_transfer.blocks.cuda_memory import HANDLE_BYTES, CudaMemory
from kv_transfer.transports import Source, source_of
from kv_transfer.transports.named import NamedBlocks, NamedOutbound
from kvrelay.errors import Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen, RemoteArena


class CudaIpcOutbound(NamedOutbound):
    """The sender's half: announces the CUDA IPC handle of its arena."""

    def announce(self, opening: KvOpen) -> KvOpen:
        """Adds the arena's handle and the kind of digest. Raises Unimplemented for memory that
        cannot be shared.
        """
        buffer = self._arena.buffer
        handle, start = CudaMemory(buffer.device).export(buffer.data_ptr())
        arena = RemoteArena(handle, start, buffer.numel(), buffer.get_device())
        return replace(opening, arena=arena, digest=digest_kind(self._arena))


class CudaIpcInbound:
    """The receiver's half. `layout` is the sender's, `device` that of the receiver's arena.

    The arena is mapped for one push only: a mapped arena keeps its memory after its process dies,
    and the next process may need that memory.
    """

    def __init__(self, arena: RemoteArena, layout: KvLayout, device: torch.device) -> None:
        if len(arena.access) != HANDLE_BYTES:
            raise Unimplemented(
                f"the handle of GPU memory has {len(arena.access)} bytes instead of {HANDLE_BYTES}"
            )
        self._arena = arena
        self._layout = layout
        self._named = NamedBlocks(arena.size, layout)
        self._device = device
        self._opened: tuple[CudaMemory, int] | None = None

    def open(self) -> None:
        """Maps the arena, before any other call. Raises Unimplemented if it cannot be read from
        here.
        """
        memory = CudaMemory(self._device)
        self._opened = memory, memory.open(self._arena.access)

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def source(self, frame: KvBlocks) -> Source:
        """Copies the frame's KV. Does not wait for the sender, so it needs no timeout."""
        assert self._opened is not None, "open comes first"
        memory, base = self._opened
        copies = self._named.copies(frame)
        payload = torch.empty(frame.num_bytes, dtype=torch.uint8, device=self._device)
        for source, target, length in copies:
            memory.copy(payload.data_ptr() + target, base + self._arena.start + source, length)
        memory.settle()
        return source_of(payload, frame, self._layout)

    def close(self) -> None:
        """Unmaps the arena. Safe to call twice."""
        if self._opened is not None:
            memory, base = self._opened
            memory.close(base)
            self._opened = None
