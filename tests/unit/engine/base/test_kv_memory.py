from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from textwrap import dedent

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.base.kv_memory import TORCH_DTYPE, KvPool
from kvrelay.types.kv_layout import KvLayout, LayerKv

LAYOUT = KvLayout((LayerKv(2, 8, 8), LayerKv(1, 16, 4)), block_size=4, dtype="bfloat16")


DIM = st.integers(1, 9)  # odd ones too: every region must be aligned all the same


@given(
    layers=st.lists(
        st.builds(LayerKv, st.integers(1, 3), DIM, DIM, st.booleans()), min_size=1, max_size=3
    ).map(tuple),
    block_size=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    num_blocks=st.integers(1, 5),
)
def test_views_lie_where_the_layout_says(
    layers: tuple[LayerKv, ...], block_size: int, dtype: str, num_blocks: int
) -> None:
    layout = KvLayout(layers, block_size, dtype)
    pool = KvPool(layout, num_blocks)
    assert pool.buffer.dtype == torch.uint8
    assert pool.buffer.shape == (layout.arena_bytes(num_blocks),)
    assert [one.v is None for one in pool.layers] == [one.v_in_k for one in layers]
    views = [view for one in pool.layers for view in (one.k, one.v) if view is not None]
    shapes = [
        (num_blocks, block_size, one.kv_heads, dim)
        for one in layers
        for dim in ((one.k_dim,) if one.v_in_k else (one.k_dim, one.v_dim))
    ]
    dtypes = [TORCH_DTYPE[dtype]] * len(views)
    if dtype == "int8":
        scales = [
            view for one in pool.layers for view in (one.k_scale, one.v_scale) if view is not None
        ]
        views, shapes = scales + views, [shape[:3] for shape in shapes] + shapes
        dtypes = [torch.bfloat16] * len(scales) + dtypes
    else:
        assert all(one.k_scale is one.v_scale is None for one in pool.layers)
    start = 0
    for view, shape, its_dtype, block_bytes in zip(
        views, shapes, dtypes, layout.region_block_bytes, strict=True
    ):
        assert (view.shape, view.dtype) == (shape, its_dtype)
        assert view.is_contiguous()
        for block in range(num_blocks):
            at = start + block * block_bytes
            value = torch.randn(shape[1:]).mul(10).to(its_dtype)
            view[block] = value
            assert (
                pool.buffer[at : at + block_bytes].tolist()
                == value.view(torch.uint8).flatten().tolist()
            )
        start += num_blocks * block_bytes
    assert start == len(pool.buffer)


def test_int8_takes_little_more_than_half_of_bfloat16() -> None:
    layers = (LayerKv(2, 64, 64),) * 5
    assert KvLayout(layers, 16, "bfloat16").block_bytes == 16 * 5 * 2 * 2 * 64 * 2
    assert KvLayout(layers, 16, "int8").block_bytes == 16 * 5 * 2 * 2 * (64 + 2)


def test_layouts_that_differ_cannot_exchange_blocks() -> None:
    layers = (LayerKv(2, 8, 8),)
    layouts = [KvLayout(layers, 4, dtype) for dtype in ("float32", "bfloat16", "float16", "int8")]
    layouts += [
        KvLayout(layers, 4, dtype, word) for dtype in ("float32", "int8") for word in (1, 2)
    ]
    layouts.append(KvLayout((LayerKv(2, 8, 8, v_in_k=True),), 4, "float32"))
    assert len({layout.hash("model") for layout in layouts}) == len(layouts)


def test_layouts_that_store_v_keep_their_hash() -> None:
    """Workers of all versions exchange blocks of them."""
    layout = KvLayout((LayerKv(2, 8, 8), LayerKv(1, 4, 2)), 4, "float32")
    assert layout.hash("model") == "31cdf87aa7e1b791"


@given(
    layers=st.lists(
        st.builds(LayerKv, st.integers(1, 3), DIM.map(lambda n: 2 * n), DIM, st.booleans()),
        min_size=1,
    ).map(tuple),
    block_size=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    word=st.sampled_from([1, 2]),
)
def test_the_kernels_order_takes_the_same_bytes(
    layers: tuple[LayerKv, ...], block_size: int, dtype: str, word: int
) -> None:
    tokens, words = KvLayout(layers, block_size, dtype), KvLayout(layers, block_size, dtype, word)
    assert words.region_block_bytes == tokens.region_block_bytes
    assert [region.dtype for region in words.regions] == [region.dtype for region in tokens.regions]
    for mine, its in zip(KvPool(words, 2).layers, KvPool(tokens, 2).layers, strict=True):
        for ordered, plain in zip(mine.regions, its.regions, strict=True):
            block_bytes = [one[1].data_ptr() - one.data_ptr() for one in (ordered, plain)]
            assert block_bytes[0] == block_bytes[1]
            assert ordered.shape[:2] == (2, plain.shape[2]), "heads come first"


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


def is_open(fd: int, memory: os.stat_result) -> bool:
    """Whether ``fd`` is the file of ``memory``; another thread may have taken the number since."""
    try:
        return os.path.samestat(os.fstat(fd), memory)
    except OSError:
        return False


def test_close_gives_the_descriptor_back_and_can_be_repeated() -> None:
    pool = KvPool(LAYOUT, 3)
    fd = pool.fd
    assert fd is not None
    memory = os.fstat(fd)
    pool.close()
    pool.close()
    assert pool.fd is None
    assert pool.layers == ()
    assert not is_open(fd, memory)


def test_pools_have_different_nonces() -> None:
    assert KvPool(LAYOUT, 1).nonce != KvPool(LAYOUT, 1).nonce


def test_a_pool_that_is_dropped_closes_its_descriptor() -> None:
    pool = KvPool(LAYOUT, 3)
    fd = pool.fd
    assert fd is not None
    memory = os.fstat(fd)
    del pool
    gc.collect()
    assert not is_open(fd, memory)


def test_a_limit_on_address_space_is_told_with_what_to_do() -> None:
    script = """
        import resource
        from kvrelay.engine.base.kv_memory import KvPool
        from kvrelay.types.kv_layout import KvLayout, LayerKv
        from kvrelay.errors import ConfigError
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        layout = KvLayout((LayerKv(2, 16, 16),), 16, "float32")
        try:
            KvPool(layout, 2**30 // layout.block_bytes)
        except ConfigError as error:
            print(error.message)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "kv.memory: 1 GiB cannot be mapped: Cannot allocate memory; lower kv.memory, or raise "
        "the limit on a process's address space (ulimit -v)\n"
    )
