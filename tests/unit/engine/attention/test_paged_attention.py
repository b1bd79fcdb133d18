"""Paged attention against the definition of attention, written out for one query, one head, one
token at a time.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_attention import naive

from kvrelay.engine.attention import reference_attention
from kvrelay.engine.attention.paged_attention import paged_attention
from kvrelay.engine.attention.ragged_batch import RaggedBatch, SequencePart, store
from kvrelay.engine.attention.reference_attention import explicit_attention
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.quantised_kv import STORED, dequantise, quantise
from kvrelay.types.kv_layout import KvLayout, LayerKv

BLOCK_SIZE = 4
NUM_BLOCKS = 24


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(
        [(1, 1, 8, 8), (4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 8), (4, 2, 12, 8), (2, 2, 8, 16)]
    ),
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 14), st.booleans()), min_size=1, max_size=4
    ),
    window=st.none() | st.integers(1, 12),
    softcap=st.sampled_from([None, None, 2.0]),
    with_sinks=st.booleans(),
    scale=st.none() | st.floats(0.05, 1.5),
    kv_dtype=st.sampled_from(["float32", "float32", "int8", "int4"]),
    v_in_k=st.booleans(),
)
def test_equals_the_definition(
    seed: int,
    shape: tuple[int, int, int, int],
    parts: list[tuple[int, int, bool]],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    scale: float | None,
    kv_dtype: str,
    v_in_k: bool,
) -> None:
    query_heads, kv_heads, k_dim, v_dim = shape
    generator = torch.Generator().manual_seed(seed)
    v_in_k = v_in_k and v_dim <= k_dim
    layer = LayerKv(kv_heads, k_dim, v_dim, v_in_k)
    kv = KvPool(KvLayout((layer,), BLOCK_SIZE, kv_dtype), NUM_BLOCKS)
    kv.buffer.fill_(255)  # NaN, of quantised KV the scales: what nobody wrote must not be read
    free = list(range(NUM_BLOCKS))
    shuffle = random.Random(seed).shuffle
    plan: list[SequencePart] = []
    slots: list[int] = []
    new_tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    expected = []
    sinks = torch.randn(query_heads, generator=generator) if with_sinks else None
    for new, past, contiguous in parts:
        if not contiguous:
            shuffle(free)
        else:
            free.sort()
        table = [free.pop(0) for _ in range(-(-(new + past) // BLOCK_SIZE))]
        is_run = table == list(range(table[0], table[0] + len(table)))
        plan.append(
            SequencePart(len(slots), new, past, torch.tensor(table), table[0] if is_run else None)
        )
        all_slots = [
            table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(past + new)
        ]
        q = torch.randn(new, query_heads, k_dim, generator=generator)
        k = torch.randn(past + new, kv_heads, k_dim, generator=generator)
        v = torch.randn(past + new, kv_heads, v_dim, generator=generator)
        v = k[..., :v_dim] if v_in_k else v
        store(kv.layers[0], torch.tensor(all_slots[:past], dtype=torch.long), k[:past], v[:past])
        slots += all_slots[past:]
        new_tensors.append((q, k[past:], v[past:]))
        true_scale = k_dim**-0.5 if scale is None else scale
        if kv_dtype != "float32":
            k, v = (
                dequantise(*quantise(tensor, STORED[kv_dtype], keys=keys), torch.float32, keys=keys)
                for tensor, keys in ((k, True), (v, False))
            )
            v = k[..., :v_dim] if v_in_k else v
        expected.append(naive(q, k, v, past, true_scale, window, softcap, sinks))
    query, key, value = (
        torch.cat(tensors).transpose(0, 1)[None] for tensors in zip(*new_tensors, strict=True)
    )
    out, _ = paged_attention(
        SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
        query,
        key,
        value,
        None,
        scaling=scale,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        ragged_batch=RaggedBatch(kv, torch.tensor(slots), plan),
    )
    assert out.shape == (1, len(slots), query_heads, v_dim)
    torch.testing.assert_close(out[0].double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_explicit_attention_in_slices_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, 9, 8, generator=generator)
    k, v = torch.randn(2, 13, 8, generator=generator), torch.randn(2, 13, 8, generator=generator)
    mask = torch.ones(9, 13, dtype=torch.bool).tril(4)
    whole = explicit_attention(q, k, v, 0.3, mask, 2.0, None)
    monkeypatch.setattr(reference_attention, "SCORE_BYTES", 4 * 4 * 13 * 2)  # two rows at a time
    torch.testing.assert_close(explicit_attention(q, k, v, 0.3, mask, 2.0, None), whole)


def test_a_run_of_blocks_is_read_without_a_copy() -> None:
    kv = KvPool(KvLayout((LayerKv(1, 8, 8),), BLOCK_SIZE, "float32"), NUM_BLOCKS)
    region = kv.layers[0].k
    table = torch.arange(3, 8)
    run = SequencePart(row=0, new=1, past=17, blocks=table, first_block=3)
    scattered = SequencePart(row=0, new=1, past=17, blocks=table, first_block=None)
    assert run.tokens(region, 6).data_ptr() == region[4, 2].data_ptr()
    assert run.tokens(region, 6).shape == (12, 1, 8)
    assert torch.equal(run.tokens(region, 6), scattered.tokens(region, 6))
    assert scattered.tokens(region, 6).data_ptr() != run.tokens(region, 6).data_ptr()
