"""Attention over paged KV, in the place of the attention of any transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvrelay.engine.int8 import dequantise, quantise
from kvrelay.engine.kv import KvPool, LayerViews
from kvrelay.engine.native.batch import PagedBatch

NAME = "kvrelay_paged"
SCORE_BYTES = 64 * 2**20  # of float32 scores that explicit attention makes at a time


@dataclass(slots=True)
class SequencePart:
    """One sequence's new tokens in a ragged batch: rows [row, row + new), after `past` tokens whose KV is there."""

    row: int
    new: int
    past: int
    blocks: torch.Tensor  # [n] int64, the sequence's block table up to its last new token
    first_block: int | None  # where the table is one ascending run
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.past + self.new

    def tokens(self, region: torch.Tensor, begin: int) -> torch.Tensor:
        """A region's tokens [begin, end) as [end - begin, kv_heads, ...]: a view where the blocks are one run."""
        size = region.shape[1]
        skipped = begin // size
        if self.first_block is not None:
            blocks = region[self.first_block + skipped : self.first_block + len(self.blocks)]
        else:
            blocks = region[self.blocks[skipped:]]
        return blocks.flatten(0, 1)[begin - skipped * size : self.end - skipped * size]

    def mask(self, begin: int, window: int) -> torch.Tensor:
        """[new, end - begin] bool: which of the tokens [begin, end) each new token sees. Window 0 is unbounded."""
        if (begin, window) not in self.masks:
            queries = torch.arange(self.past, self.end, device=self.blocks.device)[:, None]
            keys = torch.arange(begin, self.end, device=self.blocks.device)[None, :]
            seen = keys <= queries
            if window:
                seen &= keys > queries - window
            self.masks[begin, window] = seen
        return self.masks[begin, window]


@dataclass(slots=True)
class RaggedBatch:
    """What the attention of every layer needs to know of a forward pass over T new tokens of several sequences."""

    kv: KvPool
    slots: torch.Tensor  # [T] int64: block * block_size + offset, where each new token's KV goes
    parts: Sequence[SequencePart]


def store(layer: LayerViews, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes key [T, Hkv, Dk] and value [T, Hkv, Dv] of new tokens to their slots [T], quantised where the layer is."""
    for region, scales, new in ((layer.k, layer.k_scale, key), (layer.v, layer.v_scale, value)):
        if scales is not None:
            new, scale = quantise(new)
            scales.flatten(0, 1).index_copy_(0, slots, scale)
        region.flatten(0, 1).index_copy_(0, slots, new)


def load(layer: LayerViews, part: SequencePart, begin: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K [S, Hkv, Dk] and V [S, Hkv, Dv] of tokens [begin, end) of a sequence, in the model's dtype."""
    k, v = part.tokens(layer.k, begin), part.tokens(layer.v, begin)
    if layer.k_scale is None or layer.v_scale is None:
        return k, v
    k_scale, v_scale = part.tokens(layer.k_scale, begin), part.tokens(layer.v_scale, begin)
    return dequantise(k, k_scale, dtype), dequantise(v, v_scale, dtype)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    ragged_batch: RaggedBatch | PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv].

    Stores the new keys and values, then lets each new token attend to its own sequence up to itself, or to the last
    `sliding_window` tokens of it. softcap c: scores become c·tanh(scores / c). s_aux [Hq]: one more score per head that
    takes part in the softmax and carries no value.
    """
    index: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(ragged_batch, PagedBatch):
        out = ragged_batch.attend(
            index,
            query,
            key,
            value,
            scale=scale,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return out, None
    layer = ragged_batch.kv.layers[index]
    store(layer, ragged_batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    query = query[0].view(heads, groups, *query.shape[2:])
    out = query.new_empty(query.shape[2], heads, groups, value.shape[-1])
    for part in ragged_batch.parts:
        begin = max(0, part.past + 1 - sliding_window) if sliding_window else 0
        q = query[:, :, part.row : part.row + part.new]
        k, v = (tokens.transpose(0, 1) for tokens in load(layer, part, begin, query.dtype))
        window = sliding_window if sliding_window and part.end - begin > sliding_window else 0
        if softcap is None and s_aux is None:
            attended = _fused(q, k, v, scale, part, begin, window)
        else:
            sinks = None if s_aux is None else s_aux.view(heads, groups)
            attended = _explicit(q, k, v, scale, part.mask(begin, window), softcap, sinks)
        out[part.row : part.row + part.new] = attended.permute(2, 0, 1, 3)
    return out.flatten(1, 2).unsqueeze(0), None


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, part: SequencePart, begin: int, window: int
) -> torch.Tensor:
    """q [Hkv, G, new, Dk], k [Hkv, S, Dk], v [Hkv, S, Dv] -> [Hkv, G, new, Dv].

    The query heads of a group share a KV head. One new token: they lie as rows of one product. More: the KV head is
    expanded over them, which copies nothing.
    """
    if part.new == 1:
        return scaled_dot_product_attention(q.transpose(1, 2), k[:, None], v[:, None], scale=scale).transpose(1, 2)
    shape = (-1, q.shape[1], -1, -1)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    if part.past == 0 and not window:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return scaled_dot_product_attention(q, k, v, attn_mask=part.mask(begin, window), scale=scale)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `_fused`, with what no fused kernel has; mask [new, S], sinks [Hkv, G]. Softmax in float32."""
    heads, groups, new, _ = q.shape
    step = max(1, SCORE_BYTES // (4 * heads * groups * k.shape[1]))
    outs = []
    for start in range(0, new, step):
        rows = q[:, :, start : start + step]
        scores = (rows.flatten(1, 2) @ k.transpose(1, 2)).view(*rows.shape[:3], -1).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[start : start + step], float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, :, None, None].expand(-1, -1, rows.shape[2], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[1]].to(v.dtype)
        outs.append((weights.flatten(1, 2) @ v).view(*rows.shape[:3], -1))
    return torch.cat(outs, dim=2)


AttentionInterface.register(NAME, paged_attention)
