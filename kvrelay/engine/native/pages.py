"""Memory for weights, which every step reads from end to end."""

from __future__ import annotations

import math
import mmap

import torch

CHUNK = 32 * 2**20  # bytes asked of the kernel at a time
ALIGNMENT = 64  # bytes


class HugePages:
    """Tensors side by side in memory that the kernel may back with huge pages: fewer of them to
    look up per second.

    Nothing is given back before the last tensor of a chunk is gone.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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
