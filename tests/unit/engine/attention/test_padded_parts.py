"""Decoding sequences padded to the longest, against the definition of attention."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_attention import naive

from kvrelay.engine.attention import padded_parts
from kvrelay.engine.attention.packed_step import PackedShape, PackedStep
from kvrelay.engine.attention.padded_parts import PaddedParts
from kvrelay.engine.attention.ragged_batch import store
from kvrelay.engine.attention.sdpa import SdpaDecoding
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.quantised_kv import STORED, dequantise, quantise
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.types.kv_layout import KvLayout, LayerKv

SIZE = 4
NUM_BLOCKS = 24


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(
        [(1, 1, 8, 8), (4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 8), (4, 2, 12, 8), (2, 2, 8, 16)]
    ),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    window=st.none() | st.integers(1, 12),
    softcap=st.sampled_from([None, None, 2.0]),
    with_sinks=st.booleans(),
    kv_dtype=st.sampled_from(["float32", "float32", "int8", "int4"]),
    v_in_k=st.booleans(),
    key_bytes=st.sampled_from([1, 2000, 2**29]),
)
def test_equals_the_definition(
    seed: int,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    spare: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    kv_dtype: str,
    v_in_k: bool,
    key_bytes: int,
) -> None:
    query_heads, kv_heads, k_dim, v_dim = shape
    generator = torch.Generator().manual_seed(seed)
    v_in_k = v_in_k and v_dim <= k_dim
    layer = LayerKv(kv_heads, k_dim, v_dim, v_in_k)
    kv = KvPool(KvLayout((layer,), SIZE, kv_dtype), NUM_BLOCKS)
    kv.buffer.fill_(255)  # NaN, of quantised KV the scales: what nobody wrote must not be read
    free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sinks = torch.randn(query_heads, generator=generator) if with_sinks else None
    parts, new_tensors, expected = [], [], []
    for row, length in enumerate(lengths):
        part = Part(row, 1, length - 1, [free.pop() for _ in range(-(-length // SIZE))])
        q = torch.randn(1, query_heads, k_dim, generator=generator)
        k = torch.randn(length, kv_heads, k_dim, generator=generator)
        v = torch.randn(length, kv_heads, v_dim, generator=generator)
        v = k[..., :v_dim] if v_in_k else v
        past = Step([0] * (length - 1), [Part(0, length - 1, 0, part.blocks)], [])
        store(kv.layers[0], torch.tensor(past.slots(SIZE), dtype=torch.long), k[:-1], v[:-1])
        parts.append(part)
        new_tensors.append((q, k[-1:], v[-1:]))
        if kv_dtype != "float32":
            k, v = (
                dequantise(*quantise(tensor, STORED[kv_dtype], keys=keys), torch.float32, keys=keys)
                for tensor, keys in ((k, True), (v, False))
            )
            v = k[..., :v_dim] if v_in_k else v
        expected.append(naive(q, k, v, length - 1, 0.3, window, softcap, sinks))
    step = Step([0] * len(lengths), parts, [])
    width = max(len(part.blocks) for part in parts) + spare
    inputs = PackedStep.on_host(
        step, PackedShape(len(lengths), 0, len(lengths), width), SIZE, pinned=False
    )
    query, key, value = (
        torch.cat(tensors).transpose(0, 1)[None] for tensors in zip(*new_tensors, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_parts, "KEY_BYTES", key_bytes)
        batch = SdpaDecoding(kv, inputs).batch()
        out = batch.attend(
            0, query, key, value, scale=0.3, window=window or 0, softcap=softcap or 0.0, sinks=sinks
        )
    assert out.shape == (1, len(lengths), query_heads, v_dim)
    torch.testing.assert_close(out[0].double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_window_is_all_that_is_read() -> None:
    parts = PaddedParts(torch.tensor([[5, 2, 9], [7, 0, 0]]), torch.tensor([9, 1]), SIZE)
    slots, seen = parts.keys(3)
    assert slots.tolist() == [[11, 36, 37], [28, 29, 29]]
    assert seen.tolist() == [[True, True, True], [True, True, False]]
    slots, seen = parts.keys(0)
    assert slots.shape == (2, 12)
    assert seen.sum(1).tolist() == [10, 2]
