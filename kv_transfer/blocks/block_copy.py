"""Copies blocks between host memories and digests them, in one pass by a native kernel or else by
numpy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.blocks.plan import Places, byte_copies
from kvrelay.compiler.compiled import NativeUnavailable, compiled
from kvrelay.process.telemetry import get_logger

log = get_logger(__name__)

HostBytes = npt.NDArray[np.uint8]
Digests = tuple[int, ...]

# Bytes that the kernel processes at a time. A block must have several stripes.
_STRIPE = 64
_LEAST_BYTES = 256


def copy_blocks(
    source: HostBytes,
    source_places: Places,
    source_blocks: Sequence[int],
    target: HostBytes,
    target_places: Places,
    blocks: Sequence[int],
    *,
    digests: bool,
) -> Digests:
    """Copies source_blocks[i] to blocks[i]. Returns the digests of the bytes that were read if
    `digests` is set, else ().

    A block's digest is XXH3-64 of its bytes, region after region.
    """
    if _suits(source_places) and _suits(target_places) and target.ctypes.data % _STRIPE == 0:
        return _run(
            source, source_places, source_blocks, target, target_places, blocks, digests=digests
        )
    for origin, offset, length in byte_copies(source_places, source_blocks, target_places, blocks):
        target[offset : offset + length] = source[origin : origin + length]
    # Digests of the copy, so that a source that changes during the copy is detected.
    return _plain_digests(target, target_places, blocks) if digests else ()


def digest_blocks(data: HostBytes, places: Places, blocks: Sequence[int]) -> Digests:
    """The XXH3-64 digest of each block; see `copy_blocks`."""
    if _suits(places):
        return _run(data, places, blocks, None, places, blocks, digests=True)
    return _plain_digests(data, places, blocks)


def _plain_digests(data: HostBytes, places: Places, blocks: Sequence[int]) -> Digests:
    found = []
    for block in blocks:
        digest = xxhash.xxh3_64()
        for start, size in zip(places.starts, places.sizes, strict=True):
            digest.update(data[start + block * size : start + (block + 1) * size].data)
        found.append(digest.intdigest())
    return tuple(found)


class _Call(ctypes.Structure):
    """`Call` of kernels/blocks.cpp."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("source_blocks", ctypes.c_void_p),
        ("target_blocks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("region_bytes", ctypes.c_void_p),
        ("source_starts", ctypes.c_void_p),
        ("target_starts", ctypes.c_void_p),
        ("regions", ctypes.c_int64),
        ("digests", ctypes.c_void_p),
    )


def _run(
    source: HostBytes,
    source_places: Places,
    source_blocks: Sequence[int],
    target: HostBytes | None,
    target_places: Places,
    blocks: Sequence[int],
    *,
    digests: bool,
) -> Digests:
    found = np.empty(len(blocks), dtype=np.uint64)
    sources, targets = np.array(source_blocks, dtype=np.int64), np.array(blocks, dtype=np.int64)
    call = _Call(
        source.ctypes.data,
        None if target is None else target.ctypes.data,
        sources.ctypes.data,
        targets.ctypes.data,
        len(blocks),
        _array(source_places.sizes).ctypes.data,
        _array(source_places.starts).ctypes.data,
        _array(target_places.starts).ctypes.data,
        len(source_places.sizes),
        found.ctypes.data if digests else None,
    )
    _kernel()(ctypes.byref(call))
    return tuple(found.tolist()) if digests else ()


@functools.lru_cache(maxsize=256)
def _array(values: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


@functools.lru_cache(maxsize=256)
def _whole_stripes(places: Places) -> bool:
    whole = all(number % _STRIPE == 0 for number in (*places.sizes, *places.starts))
    return whole and places.block_bytes >= _LEAST_BYTES


def _suits(places: Places) -> bool:
    """True if the kernel can be used: it reads and writes whole stripes."""
    return _whole_stripes(places) and not without_kernel()


@functools.cache
def without_kernel() -> str:
    """The reason why the kernel cannot be used; empty if it can. Compiles the kernel if
    necessary.
    """
    try:
        _kernel()
    except NativeUnavailable as reason:
        log.warning("block_copy_kernel_missing", reason=str(reason))
        return str(reason)
    return ""


@functools.cache
def _kernel() -> Any:
    kernel = compiled(Path(__file__).parents[1] / "kernels").kvrelay_blocks
    kernel.restype = None
    return kernel
