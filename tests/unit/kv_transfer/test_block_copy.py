"""Copies and digests by the kernel and by numpy: the same bytes, the same digests, xxhash's own."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.blocks import block_copy
from kv_transfer.blocks.block_copy import HostBytes, copy_blocks, digest_blocks, without_kernel
from kv_transfer.blocks.plan import Places


@pytest.fixture(params=["kernel", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(block_copy, "without_kernel", lambda: "numpy was asked for")
    elif without_kernel():
        pytest.skip(without_kernel())
    return str(request.param)


def memory(size: int, seed: int) -> HostBytes:
    """Random bytes that begin where a cache line does."""
    data = np.empty(size + 64, dtype=np.uint8)
    start = -data.ctypes.data % 64
    data[:] = np.frombuffer(random.Random(seed).randbytes(len(data)), dtype=np.uint8)
    return data[start : start + size]


def places(num_blocks: int, sizes: tuple[int, ...]) -> Places:
    starts, start = [], 0
    for size in sizes:
        starts.append(start)
        start += size * num_blocks
    return Places(num_blocks, tuple(starts), sizes)


def naive(data: HostBytes, where: Places, block: int) -> bytes:
    return b"".join(
        data[start + block * size : start + (block + 1) * size].tobytes()
        for start, size in zip(where.starts, where.sizes, strict=True)
    )


@pytest.mark.parametrize(
    "sizes",
    [
        (256,),
        (1024,),
        (1088,),
        (64, 192),
        (960, 64, 64),
        (1024, 1024),
        (2048, 64),
        (64,) * 40,
        (16384, 16384, 4096, 128),
        (12,),  # too small for the kernel
        (100, 1000),
        (128,),
    ],
)
def test_bytes_and_digests(way: str, sizes: tuple[int, ...]) -> None:
    source_places, target_places = places(9, sizes), places(7, sizes)
    source, target = memory(9 * sum(sizes), 1), memory(7 * sum(sizes), 2)
    before = target.copy()
    sources, targets = [3, 4, 8, 0], [6, 5, 0, 1]
    found = copy_blocks(
        source, source_places, sources, target, target_places, targets, digests=True
    )
    for number, to, digest in zip(sources, targets, found, strict=True):
        block = naive(source, source_places, number)
        assert naive(target, target_places, to) == block
        assert digest == xxhash.xxh3_64_intdigest(block)
    for untouched in (2, 3, 4):
        assert naive(target, target_places, untouched) == naive(before, target_places, untouched)
    assert digest_blocks(source, source_places, sources) == found
    assert (
        copy_blocks(source, source_places, sources, target, target_places, targets, digests=False)
        == ()
    )
    assert copy_blocks(source, source_places, [], target, target_places, [], digests=True) == ()


def test_a_source_may_begin_anywhere(way: str) -> None:
    """As a payload does, behind the numbers of its frame."""
    where = places(2, (512, 256))
    source, target = memory(1600, 1)[13:][: 2 * 768], memory(2 * 768, 2)
    found = copy_blocks(source, where, [0, 1], target, where, [1, 0], digests=True)
    assert naive(target, where, 1) == naive(source, where, 0)
    assert found == tuple(xxhash.xxh3_64_intdigest(naive(source, where, block)) for block in (0, 1))


def test_a_target_may_begin_anywhere(way: str) -> None:
    where = places(1, (512,))
    source, target = memory(512, 1), memory(600, 2)[8:520]
    copy_blocks(source, where, [0], target, where, [0], digests=True)
    assert target.tobytes() == source.tobytes()


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 80).map(lambda n: 64 * n), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_the_kernel_and_numpy_agree(sizes: list[int], seed: int) -> None:
    where = places(3, tuple(sizes))
    data = memory(3 * sum(sizes), seed)
    expected = tuple(xxhash.xxh3_64_intdigest(naive(data, where, block)) for block in range(3))
    assert digest_blocks(data, where, range(3)) == expected


def test_any_changed_bit_changes_the_digest(way: str) -> None:
    where = places(1, (256, 64))
    data = memory(320, 1)
    rng = random.Random(0)
    seen = {digest_blocks(data, where, [0])}
    for _ in range(200):
        changed = data.copy()
        changed[rng.randrange(320)] ^= 1 << rng.randrange(8)
        seen.add(digest_blocks(changed, where, [0]))
    assert len(seen) > 150


def test_without_a_compiler_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise block_copy.NativeUnavailable("there is no C++ compiler")

    monkeypatch.setattr(block_copy, "_kernel", missing)
    monkeypatch.setattr(block_copy, "without_kernel", functools.cache(without_kernel.__wrapped__))
    assert block_copy.without_kernel() == "there is no C++ compiler"
    data = memory(1024, 1)
    assert digest_blocks(data, places(1, (1024,)), [0]) == (
        xxhash.xxh3_64_intdigest(data.tobytes()),
    )
