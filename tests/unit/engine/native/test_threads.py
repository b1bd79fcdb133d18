"""Several threads give what one gives, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.batch import PagedBatch
from kvrelay.engine.native.ops import PackedWeight, elementwise, linear, rms_norm, set_threads
from kvrelay.types.kv_layout import KvLayout, LayerKv

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def one_thread_after() -> Iterator[None]:
    yield
    set_threads(1)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
def test_rows_and_values(dtype: torch.dtype) -> None:
    x = random(0, 300, 240).to(dtype)
    weights = [PackedWeight.of(random(1, 330, 240).to(dtype), int8=int8) for int8 in (False, True)]
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(
            [
                *(linear(x[:rows], weight, None) for weight in weights for rows in (1, 2, 13, 300)),
                rms_norm(x, x[0], 1e-6),
                elementwise(Operation.SILU, torch.empty_like(x), x),
                elementwise(Operation.ADD, torch.empty_like(x), x, x[7]),
            ]
        )
    for several in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], several, strict=True))


@DTYPES
@pytest.mark.parametrize("kv_dtype", ["own", "int8", "int4"])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention(dtype: torch.dtype, kv_dtype: str, heads: int) -> None:
    own = "float32" if dtype == torch.float32 else "bfloat16"
    layout = KvLayout(
        (LayerKv(heads, 24, 40),),
        16,
        own if kv_dtype == "own" else kv_dtype,
        word=4 // dtype.itemsize,
    )
    lengths = [1, 1, 1, 40, 2, 70, 1]
    tables = [[8 * i + j for j in range(8)] for i in range(len(lengths))]
    rows = sum(lengths)
    q, k, v = (
        random(i, 1, n, rows, dim).to(dtype)
        for i, (n, dim) in enumerate([(heads * 4, 24), (heads, 24), (heads, 40)])
    )
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        kv = KvPool(layout, 8 * len(lengths))
        batch = PagedBatch(kv)
        for past in (0, 50):
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            parts = zip(starts, lengths, tables, strict=True)
            batch.update([Part(row, new, min(past, new), table) for row, new, table in parts])
            y = batch.attend(0, q, k, v, scale=0.2, window=0, softcap=0.0, sinks=None)
            found.append((threads, past, y, kv.buffer.clone()))
    for threads, past, y, buffer in found[2:]:
        _, _, wanted, wanted_buffer = found[past // 50]
        assert torch.equal(y, wanted), threads
        assert torch.equal(buffer, wanted_buffer), threads
