"""Memory for weights, all of which every step reads."""

from __future__ import annotations

import math
import mmap

import torch

# Bytes per request to the kernel.
CHUNK = 32 * 2**20
ALIGNMENT = 64  # bytes


class HugePages:
    """Tensors side by side in memory that the kernel may back with huge pages, which cost fewer
    page lookups.

    A chunk is freed only when its last tensor is gone.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, aligned to ALIGNMENT bytes."""
        size = math.prod(shape) * dtype.itemsize
        start = (self._used + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if start + size > len(self._chunk):
            self._chunk, start = _map(max(CHUNK, size)), 0
        self._used = start + size
        return self._chunk[start : start + size].view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
