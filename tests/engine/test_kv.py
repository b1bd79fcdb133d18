from __future__ import annotations

import mmap
import os

import pytest
import torch

from kvrelay.engine.kv import KvPool
from kvrelay.types import KvLayout, LayerKv

LAYOUT = KvLayout((LayerKv(2, 8, 8), LayerKv(1, 16, 4)), block_size=4, dtype="bfloat16")


def test_views_lie_where_the_layout_says() -> None:
    pool = KvPool(LAYOUT, 5)
    assert pool.buffer.dtype == torch.uint8
    assert pool.buffer.shape == (LAYOUT.arena_bytes(5),)
    start = 0
    regions = [view for layer in pool.layers for view in layer]
    shapes = [(5, 4, 2, 8), (5, 4, 2, 8), (5, 4, 1, 16), (5, 4, 1, 4)]
    for region, shape, block_bytes in zip(regions, shapes, LAYOUT.region_block_bytes, strict=True):
        assert region.shape == shape
        assert region.dtype == torch.bfloat16
        for block in range(5):
            at = start + block * block_bytes
            value = torch.randn(shape[1:]).to(torch.bfloat16)
            region[block] = value
            assert pool.buffer[at : at + block_bytes].tolist() == value.view(torch.uint8).flatten().tolist()
        start += 5 * block_bytes
    assert start == len(pool.buffer)


def test_another_mapping_of_the_memory_file_sees_and_makes_writes() -> None:
    pool = KvPool(LAYOUT, 3)
    assert os.readlink(f"/proc/self/fd/{pool.fd}") == f"/memfd:kvrelay-{pool.nonce:x} (deleted)"
    with open(f"/proc/{os.getpid()}/fd/{pool.fd}", "r+b") as file:
        other = mmap.mmap(file.fileno(), 0)
    assert len(other) == LAYOUT.arena_bytes(3)
    pool.buffer[7] = 123
    assert other[7] == 123
    other[8] = 45
    assert pool.buffer[8] == 45
    pool.close()
    assert other[7] == 123
    other.close()


def test_memory_is_taken_when_written_to() -> None:
    pool = KvPool(LAYOUT, 2**20)  # 640 MiB
    fd = pool.fd
    assert fd is not None
    assert os.fstat(fd).st_blocks == 0
    pool.layers[0].k[0] = 1
    assert 0 < os.fstat(fd).st_blocks * 512 <= 2**21


def test_close_gives_the_descriptor_back_and_can_be_repeated() -> None:
    pool = KvPool(LAYOUT, 3)
    fd = pool.fd
    assert fd is not None
    pool.close()
    pool.close()
    assert pool.fd is None
    assert pool.layers == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_pools_have_different_nonces() -> None:
    assert KvPool(LAYOUT, 1).nonce != KvPool(LAYOUT, 1).nonce
