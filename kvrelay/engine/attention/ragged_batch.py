"""Attention by torch operators over any number of new tokens from each of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.reference_attention import explicit_attention
from kvrelay.engine.base.kv_memory import KvPool, LayerViews
from kvrelay.engine.base.quantised_kv import quantise
from kvrelay.engine.base.step_input import OnLayer, Part, show_queries


class RaggedPart(Protocol):
    """Some of the new tokens: rows [row, row + new) of the batch."""

    @property
    def row(self) -> int:
        """First row of the batch that the part covers."""
        ...

    @property
    def new(self) -> int:
        """Number of rows that the part covers."""
        ...

    def attend(
        self,
        layer: LayerViews,
        query: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [Hkv, G, new, Dk] -> [Hkv, G, new, Dv]; sinks [Hkv, G]."""
        ...


@dataclass(slots=True)
class RaggedBatch:
    """A step of T new tokens. Each row belongs to exactly one part."""

    kv: KvPool
    # [T] int64: block * block_size + offset, where each new token's KV goes.
    slots: torch.Tensor
    parts: Sequence[RaggedPart]
    on_layer: OnLayer | None = None
    # Parts of the step that ask for its queries.
    asking: Sequence[Part] = ()

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `paged_attention.Batch`."""
        layer = self.kv.layers[layer_index]
        store(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self.on_layer is not None:
            self.on_layer(layer_index)
        show_queries(self.asking, layer_index, query, scale)
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        query = query[0].view(heads, groups, *query.shape[2:])
        sinks = None if sinks is None else sinks.view(heads, groups)
        out = query.new_empty(query.shape[2], heads, groups, value.shape[-1])
        for part in self.parts:
            q = query[:, :, part.row : part.row + part.new]
            attended = part.attend(
                layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            out[part.row : part.row + part.new] = attended.permute(2, 0, 1, 3)
        return out.flatten(1, 2).unsqueeze(0)


def store(layer: LayerViews, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes key [T, Hkv, Dk] and value [T, Hkv, Dv] of new tokens to their slots [T].

    A layer with scales stores quantised values. A V that is in K is not stored again.
    """
    for region, scales, new, keys in (
        (layer.k, layer.k_scale, key, True),
        (layer.v, layer.v_scale, value, False),
    ):
        if region is None:
            continue
        if scales is not None:
            new, scale = quantise(new, region.dtype, keys=keys)
            scales.flatten(0, 1).index_copy_(0, slots, scale)
        region.flatten(0, 1).index_copy_(0, slots, new)


@dataclass(slots=True)
class SequencePart:
    """The new tokens of one sequence, after `past` tokens whose KV is stored."""

    row: int
    new: int
    past: int
    # [n] int64: the sequence's block table up to its last new token.
    blocks: torch.Tensor
    # First block if the table is one ascending run, else None.
    first_block: int | None
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, part: Part, blocks: torch.Tensor) -> SequencePart:
        """Takes the part's blocks up to its last new token, as a tensor on the device."""
        table = list(part.blocks[: len(blocks)])
        is_run = table == list(range(table[0], table[0] + len(table)))
        return cls(part.row, part.new, part.past, blocks, table[0] if is_run else None)

    @property
    def end(self) -> int:
        """Length of the sequence in tokens, new tokens included."""
        return self.past + self.new

    def attend(
        self,
        layer: LayerViews,
        query: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `RaggedPart`."""
        begin = max(0, self.past + 1 - window) if window else 0
        loaded = layer.load(lambda region: self.tokens(region, begin), query.dtype)
        k, v = (tokens.transpose(0, 1) for tokens in loaded)
        window = window if self.end - begin > window else 0
        # torch chooses among several fused kernels on a GPU. With a mask, some are wrong at some
        # lengths.
        if softcap or sinks is not None or query.is_cuda:
            return explicit_attention(query, k, v, scale, self.mask(begin, window), softcap, sinks)
        # The query heads of a group share a KV head, so they are rows of one matrix product.
        if self.new == 1:
            q = query.transpose(1, 2)
            return scaled_dot_product_attention(q, k[:, None], v[:, None], scale=scale).transpose(
                1, 2
            )
        # The KV head is expanded over the query heads, which copies nothing.
        shape = (-1, query.shape[1], -1, -1)
        k, v = k[:, None].expand(shape), v[:, None].expand(shape)
        if self.past == 0 and not window:
            return scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale)
        return scaled_dot_product_attention(
            query, k, v, attn_mask=self.mask(begin, window), scale=scale
        )

    def tokens(self, region: torch.Tensor, begin: int) -> torch.Tensor:
        """A region's tokens [begin, end) as [end - begin, kv_heads, ...]; a view if the blocks are
        one run.
        """
        size = region.shape[1]
        skipped = begin // size
        if self.first_block is not None:
            blocks = region[self.first_block + skipped : self.first_block + len(self.blocks)]
        else:
            blocks = region[self.blocks[skipped:]]
        return blocks.flatten(0, 1)[begin - skipped * size : self.end - skipped * size]

    def mask(self, begin: int, window: int) -> torch.Tensor:
        """Mask [new, end - begin] bool: which of the tokens [begin, end) each new token attends to.
        Window 0 is unbounded.
        """
        if (begin, window) not in self.masks:
            queries = torch.arange(self.past, self.end, device=self.blocks.device)[:, None]
            keys = torch.arange(begin, self.end, device=self.blocks.device)[None, :]
            seen = keys <= queries
            if window:
                seen &= keys > queries - window
            self.masks[begin, window] = seen
        return self.masks[begin, window]
