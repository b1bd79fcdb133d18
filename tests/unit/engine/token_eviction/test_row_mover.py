"""Rows that change places within a sequence change nothing that it computes, for each layout of
KV.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.tiny_models import VOCAB

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.row_mover import RowMover
from kvrelay.engine.token_eviction.stored_keys import StoredKeys

LENGTH = 100


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("auto", "float32"), ("auto", "bfloat16"), ("torch", "float32")]
)
@pytest.mark.parametrize("size", [16, 32, 48])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.sweep(4)
def test_rows_in_another_order(
    tiny_model: Callable[..., Path],
    kind: str,
    kv_dtype: Literal["auto", "int8", "int4"],
    kernels: Literal["auto", "torch"],
    dtype: str,
    size: int,
) -> None:
    runner = ModelRunner.load(
        str(tiny_model(kind)),
        dtype=dtype,
        block_size=size,
        kv_bytes=1 << 20,
        kv_dtype=kv_dtype,
        kernels=kernels,
    )
    draw = random.Random(size)
    tokens = [draw.randrange(VOCAB) for _ in range(LENGTH + 1)]
    count = runner.layout.blocks_for(LENGTH + 1)
    here = draw.sample(range(runner.num_blocks), 2 * count)
    here, there = here[:count], here[count:]
    runner.forward([Segment(tokens[:LENGTH], 0, here)], [LENGTH - 1])
    order = draw.sample(range(LENGTH), LENGTH)
    mover, keys = RowMover(runner.kv), StoredKeys(runner.kv)
    before = keys.keys(0, torch.tensor(here), LENGTH)[:, order]
    mover.move(
        [here[row // size] * size + row % size for row in order],
        [there[row // size] * size + row % size for row in range(LENGTH)],
    )
    mover.move([], [])
    moved = keys.keys(0, torch.tensor(there), LENGTH)
    assert torch.equal(moved, before)
    vectors = torch.randn(len(moved), 3, moved.shape[-1])
    products = keys.products(0, torch.tensor(there), LENGTH, vectors)
    assert torch.allclose(products, vectors @ moved.transpose(1, 2), atol=1e-3)
    pairs = moved.shape[-1] // 2
    lengths = torch.complex(*moved.contiguous()[..., : 2 * pairs].chunk(2, dim=-1)).abs()
    products = keys.lengths(0, torch.tensor(there), LENGTH, vectors[..., :pairs])
    assert torch.allclose(products, vectors[..., :pairs] @ lengths.transpose(1, 2), atol=1e-3)
    wanted, found = (
        runner.forward([Segment(tokens[LENGTH:], LENGTH, table)], [0]).float().clone()
        for table in (here, there)
    )
    runner.close()
    # Sums are rounded in another order.
    rounding = torch.finfo(getattr(torch, dtype)).eps
    assert (found - wanted).norm() <= 64 * rounding * wanted.norm()
