"""The memory that holds KV blocks."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.engine.base.quantised_kv import dequantise
from kvrelay.engine.base.vacated_memory import VacatedMemory
from kvrelay.errors import ConfigError
from kvrelay.planning.quantity import size as text_of
from kvrelay.types.kv_layout import KvLayout, LayerKv

TORCH_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's part of the arena, each [num_blocks, ...] as in `KvLayout`. Scales are None
    unless KV is quantised. V and its scales are None if V is the first `v_dim` values of K.
    """

    v_dim: int
    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """What there is of K, V and their scales."""
        found = (self.k, self.v, self.k_scale, self.v_scale)
        return tuple(region for region in found if region is not None)

    def load(
        self, take: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [..., Dk] and V [..., Dv] of the tokens that `take` takes out of a region, in `dtype`
        if KV is quantised. For KV in token order.
        """
        k = take(self.k)
        if self.k_scale is not None:
            k = dequantise(k, take(self.k_scale), dtype, keys=True)
        if self.v is None:
            return k, k[..., : self.v_dim]
        v = take(self.v)
        if self.v_scale is not None:
            v = dequantise(v, take(self.v_scale), dtype, keys=False)
        return k, v


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
        count = sum(len(layer.stored_dims) for layer in share.layers)
        values, scales = iter(tensors[-count:]), iter(tensors[:-count])

        def views(layer: LayerKv) -> LayerViews:
            k, v = next(values), None if layer.v_in_k else next(values)
            k_scale = next(scales, None)
            v_scale = None if layer.v_in_k else next(scales, None)
            return LayerViews(layer.v_dim, k, v, k_scale, v_scale)

        return tuple(views(layer) for layer in share.layers)

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
