"""The memory that KV blocks lie in, as a transport sees it: bytes. Slow calls, for worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kv_transfer.plan import byte_copies, byte_ranges
from kvrelay.errors import DataLoss
from kvrelay.types import KvLayout

HostBytes = npt.NDArray[np.uint8]


class Arena(Protocol):
    """`buffer` is 1-D uint8, laid out as `layout` says. On a CPU it is a memory file named `kvrelay-NONCE`."""

    buffer: torch.Tensor
    fd: int | None  # of the memory file; None on another device
    nonce: int
    layout: KvLayout
    num_blocks: int


def read_blocks(arena: Arena, blocks: Sequence[int]) -> torch.Tensor:
    """The bytes of `blocks` in plan order: a new 1-D uint8 tensor on the arena's device."""
    ranges = byte_ranges(arena.layout, arena.num_blocks, blocks)
    return torch.cat([arena.buffer[offset : offset + length] for offset, length in ranges])


def write_blocks(arena: Arena, blocks: Sequence[int], data: torch.Tensor | HostBytes) -> None:
    """The reverse of `read_blocks`; `data` is a tensor on the arena's device, or bytes on the host for a CPU arena."""
    target: Any = arena.buffer if isinstance(data, torch.Tensor) else arena.buffer.numpy()
    position = 0
    for offset, length in byte_ranges(arena.layout, arena.num_blocks, blocks):
        target[offset : offset + length] = data[position : position + length]
        position += length


def copy_blocks(
    source: HostBytes, source_num_blocks: int, source_blocks: Sequence[int], arena: Arena, blocks: Sequence[int]
) -> None:
    """From an arena of the same layout, given as its bytes, to this one; both on the host."""
    target = arena.buffer.numpy()
    copies = byte_copies(arena.layout, source_num_blocks, source_blocks, arena.num_blocks, blocks)
    for origin, offset, length in copies:
        target[offset : offset + length] = source[origin : origin + length]


def digest_blocks(arena: Arena, blocks: Sequence[int]) -> int:
    """xxh3-64 of the bytes of `blocks` in plan order; the arena is on the host."""
    data = arena.buffer.numpy()
    digest = xxhash.xxh3_64()
    for offset, length in byte_ranges(arena.layout, arena.num_blocks, blocks):
        digest.update(data[offset : offset + length].data)
    return digest.intdigest()


def digest_bytes(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def check_digest(sent: int, arrived: int) -> None:
    """Raises DataLoss if they differ."""
    if sent != arrived:
        raise DataLoss(f"KV arrived with digest {arrived:016x}, not {sent:016x} as sent; none of it will be used")
