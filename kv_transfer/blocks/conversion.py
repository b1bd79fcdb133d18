"""Converts blocks between layouts with different block sizes, orders, dtypes and numbers of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kv_transfer.blocks.plan import Layers, Places
from kvrelay.engine.base.kv_memory import TORCH_DTYPE
from kvrelay.engine.base.quantised_kv import dequantise, quantise
from kvrelay.engine.base.token_views import scale_view, token_views
from kvrelay.types.kv_layout import SCALE_DTYPE, KvLayout, LayerKv


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks that hold the KV of a sequence from token `start` on."""

    # 1-D uint8: the memory that holds the blocks.
    data: torch.Tensor
    layout: KvLayout
    # Places of the regions of the layers to convert.
    places: Places
    blocks: Sequence[int]
    start: int

    def rows(self, tokens: range) -> slice:
        """Rows of the span that hold `tokens`."""
        return slice(tokens.start - self.start, tokens.stop - self.start)


def convert(source: Span, target: Span, tokens: range, layers: Layers) -> None:
    """Copies the KV of `tokens`, consecutive positions that both spans hold. The rest of the target
    is unchanged.

    Each head goes to the rank that has it. int8 and int4 are written and read as in
    `kvrelay.engine.base.quantised_kv`, so their error is at most half a scale. Other dtypes are
    rounded to the nearest value.
    """
    from_rows, to_rows = source.rows(tokens), target.rows(tokens)
    shapes, ours = _stored(source, layers), _stored(target, layers)
    for of_source, of_target in zip(shapes, ours, strict=True):
        taken, given = _Vectors.read(source, of_source), _Vectors.read(target, of_target)
        given.put(to_rows, taken.at(from_rows))
        given.write(target, of_target)


@dataclass(frozen=True, slots=True)
class _Stored:
    """K or V of one of the layers to convert."""

    # With the heads of one rank.
    layer: LayerKv
    keys: bool
    # The number of its region among those of K and V of a rank, and how many these are.
    index: int
    count: int


def _stored(span: Span, layers: Layers) -> list[_Stored]:
    """K and V of the layers in the order of their regions. A V that is in K has no region."""
    chosen = span.layout.share.layers[layers.first : layers.first + layers.num]
    found = [(layer, index == 0) for layer in chosen for index, _ in enumerate(layer.stored_dims)]
    return [_Stored(*one, index, len(found)) for index, one in enumerate(found)]


@dataclass(frozen=True, slots=True)
class _Vectors:
    """K or V of one layer with all ranks' heads: values [tokens, heads, dim], for int4 [tokens,
    heads, dim / 2], and scales [tokens, heads] if they are quantised.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    keys: bool

    @classmethod
    def read(cls, span: Span, stored: _Stored) -> _Vectors:
        blocks = torch.tensor(span.blocks)
        heads = stored.layer.kv_heads
        rows = len(span.blocks) * span.layout.block_size
        ranks = range(span.layout.ranks)
        values = [
            torch.cat(
                [part[blocks].reshape(rows, heads, -1) for part in _in_order(span, stored, rank)],
                dim=2,
            )
            for rank in ranks
        ]
        scales = None
        if span.layout.is_quantised:
            shares = [_scales(span, stored, rank)[blocks].reshape(rows, heads) for rank in ranks]
            scales = torch.cat(shares, dim=1)
        return cls(torch.cat(values, dim=1), scales, stored.keys)

    def at(self, rows: slice) -> _Vectors:
        scales = None if self.scales is None else self.scales[rows]
        return replace(self, values=self.values[rows], scales=scales)

    def put(self, rows: slice, new: _Vectors) -> None:
        values, scales, dtype = new.values, new.scales, self.values.dtype
        if scales is not None and values.dtype != dtype:
            plain = dtype if self.scales is None else torch.float32
            values, scales = dequantise(values, scales, plain, keys=self.keys), None
        if self.scales is None:
            self.values[rows] = values.to(dtype)
            return
        if scales is None:
            values, scales = quantise(values, dtype, keys=self.keys)
        self.values[rows], self.scales[rows] = values, scales

    def write(self, span: Span, stored: _Stored) -> None:
        blocks = torch.tensor(span.blocks)
        ranks = span.layout.ranks
        for rank, values in enumerate(self.values.chunk(ranks, dim=1)):
            start = 0
            for part in _in_order(span, stored, rank):
                shape = (len(span.blocks), *part.shape[1:])
                width = math.prod(shape) // math.prod(values.shape[:2])
                part[blocks] = values[..., start : start + width].reshape(shape)
                start += width
        if self.scales is not None:
            for rank, scales in enumerate(self.scales.chunk(ranks, dim=1)):
                _scales(span, stored, rank)[blocks] = scales.reshape(
                    len(span.blocks), -1, scales.shape[1]
                )


def _in_order(span: Span, stored: _Stored, rank: int) -> list[torch.Tensor]:
    """Views of a rank's K or V region; see `token_views`."""
    layout = span.layout
    number = stored.index + (stored.count if layout.is_quantised else 0)
    region = _region(span, rank, number, layout.stored_dtype).view(span.places.num_blocks, -1)
    return token_views(region, layout, stored.layer, keys=stored.keys)


def _scales(span: Span, stored: _Stored, rank: int) -> torch.Tensor:
    """A view [num_blocks, block_size, heads] of the region of a rank's scales."""
    region = _region(span, rank, stored.index, SCALE_DTYPE)
    return scale_view(region, span.layout, stored.layer.kv_heads)


def _region(span: Span, rank: int, number: int, dtype: str) -> torch.Tensor:
    number += rank * (len(span.places.sizes) // span.layout.ranks)
    start, size = span.places.starts[number], span.places.sizes[number]
    return span.data[start : start + size * span.places.num_blocks].view(TORCH_DTYPE[dtype])
