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
    for index in range(2 * layers.num):
        taken, given = _Vectors.read(source, layers, index), _Vectors.read(target, layers, index)
        given.put(to_rows, taken.at(from_rows))
        given.write(target, layers, index)


@dataclass(frozen=True, slots=True)
class _Vectors:
    """K or V of one layer with all ranks' heads: values [tokens, heads, dim], for int4 [tokens,
    heads, dim / 2], and scales [tokens, heads] if they are quantised.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    keys: bool

    @classmethod
    def read(cls, span: Span, layers: Layers, index: int) -> _Vectors:
        """`index` counts K and V of the layers alternately."""
        blocks = torch.tensor(span.blocks)
        heads = _layer(span, layers, index).kv_heads
        rows = len(span.blocks) * span.layout.block_size
        ranks = range(span.layout.ranks)
        values = [
            torch.cat(
                [
                    part[blocks].reshape(rows, heads, -1)
                    for part in _in_order(span, layers, index, rank)
                ],
                dim=2,
            )
            for rank in ranks
        ]
        scales = None
        if span.layout.is_quantised:
            shares = [
                _scales(span, layers, index, rank)[blocks].reshape(rows, heads) for rank in ranks
            ]
            scales = torch.cat(shares, dim=1)
        return cls(torch.cat(values, dim=1), scales, index % 2 == 0)

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

    def write(self, span: Span, layers: Layers, index: int) -> None:
        blocks = torch.tensor(span.blocks)
        ranks = span.layout.ranks
        for rank, values in enumerate(self.values.chunk(ranks, dim=1)):
            start = 0
            for part in _in_order(span, layers, index, rank):
                shape = (len(span.blocks), *part.shape[1:])
                width = math.prod(shape) // math.prod(values.shape[:2])
                part[blocks] = values[..., start : start + width].reshape(shape)
                start += width
        if self.scales is not None:
            for rank, scales in enumerate(self.scales.chunk(ranks, dim=1)):
                _scales(span, layers, index, rank)[blocks] = scales.reshape(
                    len(span.blocks), -1, scales.shape[1]
                )


def _layer(span: Span, layers: Layers, index: int) -> LayerKv:
    """The layer, with the heads of one rank."""
    return span.layout.share.layers[layers.first + index // 2]


def _in_order(span: Span, layers: Layers, index: int, rank: int) -> list[torch.Tensor]:
    """Views of a rank's K or V region; see `token_views`."""
    layout, layer = span.layout, _layer(span, layers, index)
    first = 2 * layers.num if layout.is_quantised else 0
    region = _region(span, rank, first + index, layout.stored_dtype)
    return token_views(region.view(span.places.num_blocks, -1), layout, layer, keys=index % 2 == 0)


def _scales(span: Span, layers: Layers, index: int, rank: int) -> torch.Tensor:
    """A view [num_blocks, block_size, heads] of the region of a rank's scales."""
    region = _region(span, rank, index, SCALE_DTYPE)
    return scale_view(region, span.layout, _layer(span, layers, index).kv_heads)


def _region(span: Span, rank: int, number: int, dtype: str) -> torch.Tensor:
    number += rank * (len(span.places.sizes) // span.layout.ranks)
    start, size = span.places.starts[number], span.places.sizes[number]
    return span.data[start : start + size * span.places.num_blocks].view(TORCH_DTYPE[dtype])
