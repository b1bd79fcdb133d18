"""Attention and the store of the kernels against the definition of attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.quantised_kv import STORED, dequantise, quantise
from kvrelay.engine.base.step_input import Part
from kvrelay.engine.native.batch import PagedBatch
from kvrelay.types.kv_layout import KvLayout, LayerKv, holds

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Tensors:
    """A whole sequence's tensors: q [T, Hq, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return len(self.q)


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: str  # auto, int8 or int4
    window: int
    softcap: float
    with_sinks: bool
    v_in_k: bool = False

    @property
    def layout(self) -> KvLayout:
        stored = NAMES[self.dtype] if self.kv_dtype == "auto" else self.kv_dtype
        return KvLayout(
            (LayerKv(self.kv_heads, self.k_dim, self.v_dim, self.v_in_k),),
            self.block_size,
            stored,
            word=4 // self.dtype.itemsize,
        )

    @property
    def sinks(self) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(5)
        return (
            torch.randn(self.kv_heads * self.group, generator=generator)
            if self.with_sinks
            else None
        )

    def sequence(self, tokens: int, seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        heads = self.kv_heads * self.group

        def tensor(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(tokens, heads, dim, generator=generator).to(self.dtype)

        q, k = tensor(heads, self.k_dim), tensor(self.kv_heads, self.k_dim)
        v = k[..., : self.v_dim] if self.v_in_k else tensor(self.kv_heads, self.v_dim)
        return Tensors(q, k, v)


ANY_SHAPES = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 12, 13, 16, 25]),
    k_dim=st.sampled_from([2, 8, 24, 32, 40, 64]),
    v_dim=st.sampled_from([1, 8, 24, 32, 40, 64]),
    block_size=st.sampled_from([16, 32, 48, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_dtype=st.sampled_from(["auto", "auto", "int8", "int4"]),
    window=st.sampled_from([0, 0, 1, 5, 16, 33, 50, 140]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    with_sinks=st.booleans(),
    v_in_k=st.booleans(),
)
SHAPES = ANY_SHAPES.filter(
    lambda shape: (
        holds(shape.kv_dtype, shape.layout.layers)
        and not (shape.v_in_k and shape.v_dim > shape.k_dim)
    )
)
LONG_HEADS = [  # as DeepSeek's, and as wide as any
    Shape(2, 1, 192, 128, 32, torch.bfloat16, "auto", 0, 0.0, False),
    Shape(2, 1, 192, 128, 16, torch.float32, "int8", 0, 0.0, False),
    Shape(1, 4, 256, 256, 32, torch.float32, "auto", 9, 50.0, False),
    Shape(1, 64, 80, 40, 32, torch.bfloat16, "auto", 20, 0.0, True),
    Shape(2, 1, 192, 128, 32, torch.bfloat16, "int4", 0, 0.0, False),
    # Latent vectors of DeepSeek-V2-Lite and of DeepSeek-V3.
    Shape(1, 16, 576, 512, 32, torch.bfloat16, "auto", 0, 0.0, False),
    Shape(1, 16, 576, 512, 16, torch.float32, "auto", 0, 0.0, False),
    Shape(1, 128, 576, 512, 32, torch.bfloat16, "int8", 0, 0.0, False),
    Shape(1, 4, 76, 44, 16, torch.float32, "int4", 9, 50.0, True),
    Shape(1, 16, 576, 512, 32, torch.bfloat16, "auto", 0, 0.0, False, v_in_k=True),
    Shape(1, 16, 576, 512, 16, torch.float32, "auto", 0, 0.0, False, v_in_k=True),
    Shape(1, 128, 576, 512, 32, torch.bfloat16, "int8", 0, 0.0, False, v_in_k=True),
    Shape(1, 128, 576, 512, 16, torch.bfloat16, "int4", 0, 0.0, False, v_in_k=True),
    # The rotation mixes values of V with others.
    Shape(1, 40, 64, 24, 32, torch.float32, "int4", 9, 50.0, True, v_in_k=True),
    Shape(2, 100, 40, 33, 48, torch.float32, "int8", 40, 0.0, True, v_in_k=True),
]
LENGTHS = st.lists(st.integers(1, 90) | st.integers(120, 270), min_size=1, max_size=3)


def definition(shape: Shape, sequence: Tensors) -> torch.Tensor:
    """[T, Hq, Dv] in float64."""
    tokens = torch.arange(len(sequence))
    seen = tokens[None, :] <= tokens[:, None]
    if shape.window:
        seen &= tokens[None, :] > tokens[:, None] - shape.window
    k, v = sequence.k, sequence.v
    if shape.kv_dtype != "auto":
        k = after_rounding(k, shape, keys=True)
        v = k[..., : shape.v_dim] if shape.v_in_k else after_rounding(v, shape, keys=False)
    k, v = (tensor.double().repeat_interleave(shape.group, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", sequence.q.double(), k) * shape.k_dim**-0.5
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if shape.sinks is not None:
        total = total + shape.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def after_rounding(vectors: torch.Tensor, shape: Shape, *, keys: bool) -> torch.Tensor:
    """Vectors as quantised KV holds them, in float64."""
    stored = quantise(vectors, STORED[shape.kv_dtype], keys=keys)
    return dequantise(*stored, torch.float64, keys=keys)


class Arena:
    """Sequences that are computed part by part, in blocks that others have used."""

    def __init__(self, shape: Shape, sequences: Sequence[Tensors], seed: int) -> None:
        self.shape = shape
        self.sequences = sequences
        blocks = list(range(sum(shape.layout.blocks_for(len(one)) for one in sequences) + 2))
        self.kv = KvPool(shape.layout, len(blocks))
        self.kv.buffer.fill_(255)  # NaN, of int8 the scales
        random.Random(seed).shuffle(blocks)
        self.tables = [
            [blocks.pop() for _ in range(shape.layout.blocks_for(len(one)))] for one in sequences
        ]
        self.batch = PagedBatch(self.kv)
        self.done = [0] * len(sequences)
        self.found = [
            [torch.empty(0, *one.v.shape[1:]).repeat(1, shape.group, 1)] for one in sequences
        ]

    def step(self, counts: dict[int, int], *, transposed: bool = False) -> None:
        """Computes the next tokens of some sequences: index -> how many."""
        parts = []
        row = 0
        for index, count in counts.items():
            parts.append(Part(row, count, self.done[index], self.tables[index]))
            row += count
        taken = [
            [tensor[self.done[i] : self.done[i] + count] for tensor in (one.q, one.k, one.v)]
            for i, count in counts.items()
            for one in [self.sequences[i]]
        ]
        q, k, v = (torch.cat(tensors).transpose(0, 1)[None] for tensors in zip(*taken, strict=True))
        if transposed:  # [1, H, T, D] as it is, rather than as a view of [1, T, H, D]
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        self.batch.update(parts)
        y = self.batch.attend(
            0,
            q,
            k,
            v,
            scale=self.shape.k_dim**-0.5,
            window=self.shape.window,
            softcap=self.shape.softcap,
            sinks=self.shape.sinks,
        )
        assert y.shape == (1, row, q.shape[1], v.shape[3])
        for part, index in zip(parts, counts, strict=True):
            self.found[index].append(y[0, part.row : part.row + part.new].clone())
            self.done[index] += part.new

    def run(self, chunk: int) -> list[torch.Tensor]:
        """The rest of all, `chunk` tokens at a time; what each sequence's tokens gave, [T, Hq,
        Dv].
        """
        while left := {
            i: min(chunk, len(one) - self.done[i])
            for i, one in enumerate(self.sequences)
            if self.done[i] < len(one)
        }:
            self.step(left, transposed=chunk % 2 == 1)
        return [torch.cat(found[1:]) for found in self.found]


def check(shape: Shape, lengths: Sequence[int], chunk: int, seed: int) -> None:
    sequences = [shape.sequence(length, seed + i) for i, length in enumerate(lengths)]
    for sequence, found in zip(sequences, Arena(shape, sequences, seed).run(chunk), strict=True):
        wanted = definition(shape, sequence)
        assert found.dtype == shape.dtype
        # In bfloat16 each weight is rounded, to 2^-9 of it, and so is the result.
        tolerance = 2e-5 if shape.dtype == torch.float32 else 2**-8
        allowed = tolerance * wanted.abs() + tolerance * float(sequence.v.abs().max())
        assert ((found.double() - wanted).abs() <= allowed).all()


@settings(max_examples=60)
@given(SHAPES, LENGTHS, st.integers(1, 90), st.integers(0, 10**6))
def test_equals_the_definition(shape: Shape, lengths: list[int], chunk: int, seed: int) -> None:
    check(shape, lengths, chunk, seed)


@pytest.mark.parametrize("shape", LONG_HEADS, ids=str)
def test_wide_heads_and_many_that_share_one(shape: Shape) -> None:
    check(shape, [70, 3], 40, seed=0)


@settings(max_examples=40)
@given(
    SHAPES,
    st.integers(1, 100),
    st.lists(st.integers(1, 40), min_size=1),
    LENGTHS,
    st.integers(0, 10**6),
)
def test_a_token_does_not_depend_on_the_chunks_or_the_batch(
    shape: Shape, length: int, chunks: list[int], lengths: list[int], seed: int
) -> None:
    """To the bit."""
    ours = shape.sequence(length, seed)
    (whole,) = Arena(shape, [ours], seed).run(length)
    others = [shape.sequence(other, seed + 1 + i) for i, other in enumerate(lengths)]
    arena = Arena(shape, [*others, ours], seed + 1)
    for chunk in chunks:
        counts = {i: min(chunk, len(one) - arena.done[i]) for i, one in enumerate(arena.sequences)}
        if not counts[len(others)]:
            break
        arena.step({i: count for i, count in counts.items() if count})
    assert torch.equal(arena.run(1)[-1], whole)


@settings(max_examples=25)
@given(SHAPES, st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
def test_stored_values_are_in_the_order_that_the_layout_says(
    shape: Shape, length: int, chunk: int, seed: int
) -> None:
    sequence = shape.sequence(length, seed)
    arena = Arena(shape, [sequence], seed)
    before = arena.kv.buffer.clone()
    arena.run(chunk)
    layer = arena.kv.layers[0]
    size, word, panel, packed = shape.block_size, 4 // shape.dtype.itemsize, 32, 1
    if shape.kv_dtype == "int4":
        word, panel, packed = 1, 16, 2
    (table,) = arena.tables
    keys = [
        torch.stack(
            [keys_of(head, shape.k_dim // packed, size, word) for head in layer.k[block]], 1
        )
        for block in table
    ]
    stored = [(sequence.k, torch.cat(keys), layer.k_scale, True)]
    assert (layer.v is None) == shape.v_in_k
    if layer.v is not None:
        values = [
            torch.stack(
                [values_of(head, shape.v_dim // packed, size, word, panel) for head in one], 1
            )
            for one in layer.v[table]
        ]
        stored.append((sequence.v, torch.cat(values), layer.v_scale, False))
    for tensor, found, scales, is_keys in stored:
        if scales is None:
            assert torch.equal(found[:length], tensor)
            continue
        wanted, wanted_scale = quantise(tensor, STORED[shape.kv_dtype], keys=is_keys)
        assert torch.equal(found[:length], wanted)
        assert torch.equal(scales[table].transpose(1, 2).flatten(0, 1)[:length], wanted_scale)
    layout = shape.layout
    vectors = (shape.k_dim,) if shape.v_in_k else (shape.k_dim, shape.v_dim)
    width = 8 if shape.kv_dtype == "int8" else 4 if packed == 2 else 8 * shape.dtype.itemsize
    scale_bits = 0 if shape.kv_dtype == "auto" else 16
    token_bits = sum(dim * width + scale_bits for dim in vectors) * shape.kv_heads
    assert 8 * layout.block_bytes == token_bits * size
    changed = int((arena.kv.buffer != before).sum())
    assert changed <= length * layout.block_bytes // size, "more was written than these tokens' KV"


def keys_of(head: torch.Tensor, dim: int, size: int, word: int) -> torch.Tensor:
    """A block's keys of one head as [block_size, dim], from groups of keys, each [words][keys of
    the group].
    """
    group = 32 if size % 32 == 0 else 16
    return head.view(size // group, dim // word, group, word).permute(0, 2, 1, 3).reshape(size, dim)


def values_of(head: torch.Tensor, dim: int, size: int, word: int, panel: int) -> torch.Tensor:
    """A block's values of one head as [block_size, dim], from panels of columns, each
    [words][columns].
    """
    panels = head.split([size * min(panel, dim - column) for column in range(0, dim, panel)])
    return torch.cat(
        [panel.view(size // word, -1, word).transpose(1, 2).reshape(size, -1) for panel in panels],
        1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("v_in_k", [False, True])
def test_what_is_no_number_stays_visible_in_its_sequence(
    dtype: torch.dtype, kv_dtype: str, v_in_k: bool
) -> None:
    v_dim = 4 if v_in_k else 32
    shape = Shape(1, 2, 8, v_dim, 16, dtype, kv_dtype, 0, 0.0, False, v_in_k)
    good, bad = shape.sequence(40, 0), shape.sequence(40, 1)
    bad.k[35, 0, 3] = torch.nan
    found = Arena(shape, [good, bad], 0).run(7)
    assert found[1][35:].isnan().all()
    assert found[1][:32].isfinite().all()
    assert torch.equal(found[0], Arena(shape, [good], 1).run(40)[0])


@given(SHAPES, st.integers(0, 17), st.integers(0, 10**6))
def test_of_huge_scores_comes_a_mean_of_values(shape: Shape, exponent: int, seed: int) -> None:
    """Differences of such scores are rounded to more than any weight."""
    sequence = shape.sequence(50, seed)
    sequence.q.mul_(10.0**exponent)
    sequence.k.mul_(10.0**exponent)
    (found,) = Arena(shape, [sequence], seed).run(20)
    # A quantised value may be larger than its own. int4 numbers of V that is in K are rotated back:
    # the error of one is that of the largest in its vector.
    rotated = shape.v_in_k and shape.kv_dtype == "int4"
    most = 1.5 * sequence.k.abs().max() if rotated else 1.05 * sequence.v.abs().max()
    assert (found.abs() <= most).all()


def test_which_models_suit() -> None:
    def suits(k_dim: int, block_size: int, dtype: torch.dtype) -> bool:
        return PagedBatch.suits(
            KvLayout((LayerKv(1, k_dim, 3),), block_size, NAMES.get(dtype, "float16")), dtype
        )

    assert suits(2, 16, torch.bfloat16)
    assert suits(1, 48, torch.float32)
    assert not suits(3, 16, torch.bfloat16)
    assert not suits(8, 8, torch.float32)
    assert not suits(8, 16, torch.float16)
