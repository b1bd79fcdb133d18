"""The memory that holds KV blocks."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from typing import NamedTuple

import torch

from kvrelay.engine.base.vacated_memory import VacatedMemory
from kvrelay.errors import ConfigError
from kvrelay.planning.quantity import size as text_of
from kvrelay.types.kv_layout import KvLayout

TORCH_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class LayerViews(NamedTuple):
    """One layer's part of the arena, each [num_blocks, ...] as in `KvLayout`. Scales are None
    unless KV is quantised.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class KvPool:
    """One flat byte buffer in the order of `KvLayout`, and for each layer a typed view of this
    rank's share.

    On a CPU the buffer is an anonymous memory file, `kvrelay-NONCE`. Another process of the same
    host and user maps it through /proc/PID/fd/FD and checks the nonce. Its pages take up memory
    once they are written. With tensor parallelism rank 0 makes the file for all ranks, and the
    others map it.

    On GPUs each rank makes a buffer for its own share, and rank 0 also maps the other ranks'
    `shares`.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: str = "cpu",
        *,
        rank: int = 0,
        of_rank_0: str = "",
    ) -> None:
        """Allocates the buffer, or maps `of_rank_0`: the path to rank 0's memory file, for the
        other ranks on a CPU.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.nonce = secrets.randbits(63)
        self.fd: int | None = None
        self._rank = rank
        self._vacated: VacatedMemory | None = None
        size = layout.arena_bytes(num_blocks)
        if of_rank_0:
            self.fd = os.open(of_rank_0, os.O_RDWR | os.O_CLOEXEC)
            self.buffer = torch.frombuffer(_mapped(self.fd, size), dtype=torch.uint8)
        elif torch.device(device).type == "cpu":
            self.fd = os.memfd_create(
                f"kvrelay-{self.nonce:x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            os.ftruncate(self.fd, size)
            # If a mapped file shrinks, the kernel kills the processes that map it. The seal
            # prevents that.
            fcntl.fcntl(
                self.fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self.buffer = torch.frombuffer(_mapped(self.fd, size), dtype=torch.uint8)
        else:
            self.buffer = torch.empty(size // layout.ranks, dtype=torch.uint8, device=device)
        self.shares: tuple[torch.Tensor, ...] = (self.buffer,)
        self.layers = self._views()
        # A pool that is dropped without `close` closes its descriptor as well.
        self._close_fd = None if self.fd is None else weakref.finalize(self, os.close, self.fd)

    def _views(self) -> tuple[LayerViews, ...]:
        tensors = []
        share = self.layout.share
        start = self._rank * share.arena_bytes(self.num_blocks) if self.buffer.is_cpu else 0
        for region, block_bytes in zip(share.regions, share.region_block_bytes, strict=True):
            end = start + self.num_blocks * block_bytes
            flat = self.buffer[start:end].view(TORCH_DTYPE[region.dtype])
            tensors.append(flat.view(self.num_blocks, *region.block_shape))
            start = end
        count = 2 * len(share.layers)
        scales: list[torch.Tensor | None] = [*tensors[:-count]] or [None] * count
        values = tensors[-count:]
        layers = zip(values[::2], values[1::2], scales[::2], scales[1::2], strict=True)
        return tuple(LayerViews(*layer) for layer in layers)

    @property
    def stored_bytes(self) -> int:
        """Memory that the memory file takes, without the pages that were never written or are
        vacated.
        """
        assert self.fd is not None, "a GPU has no memory file"
        return os.fstat(self.fd).st_blocks * 512

    @property
    def vacated(self) -> VacatedMemory:
        """Where blocks give up memory. For a memory file of this process."""
        if self._vacated is None:
            assert self.fd is not None, "a GPU has no memory file"
            self._vacated = VacatedMemory(self.layout, self.num_blocks, self.fd)
        return self._vacated

    def close(self) -> None:
        """Releases the memory. Mappings of other processes stay valid. Safe to call twice."""
        if self._vacated is not None:
            self._vacated.close()
        self.layers = ()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.shares = ()
        if self._close_fd is not None:
            self._close_fd()
            self.fd = None


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Maps `size` bytes of the file. Raises ConfigError if this process may not map so much."""
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise ConfigError(
            f"kv.memory: {text_of(size)} cannot be mapped: {error.strerror}; lower kv.memory, or "
            "raise the limit on a process's address space (ulimit -v)"
        ) from error
