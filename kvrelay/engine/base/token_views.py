"""Views of KV memory in which tokens are separate, for any order of a layout."""

from __future__ import annotations

import torch

from kvrelay.types.kv_layout import KvLayout, LayerKv

# Keys, or columns of values, of one packed tile in the kernels' order.
PANEL = 32


def token_views(
    region: torch.Tensor, layout: KvLayout, layer: LayerKv, *, keys: bool
) -> list[torch.Tensor]:
    """Views of a region of K or V, [num_blocks, tokens..., heads, dim...]; for int4 with the bytes
    of dim.

    The dims of `tokens` have block_size elements in all, and those of `dim` as many as the vector.
    There is one view, or two of V: one of the columns in whole tiles and one of the other columns.
    `layer` has the heads that the region has.
    """
    dim = layer.k_dim if keys else layer.v_dim
    size, heads, word = layout.block_size, layer.kv_heads, layout.word
    num, panel = region.shape[0], PANEL
    if layout.dtype == "int4":
        # A byte is a word of its own, of keys and of values.
        dim, panel, word = dim // 2, PANEL // 2, word and 1
    if not word:
        return [region.view(num, size, heads, dim)]
    region = region.view(num, heads, size * dim)
    if keys:
        group = PANEL if size % PANEL == 0 else PANEL // 2
        grouped = region.view(num, heads, size // group, dim // word, group, word)
        return [grouped.permute(0, 2, 4, 1, 3, 5)]
    whole = dim // panel * panel
    panels, rest = region[..., : size * whole], region[..., size * whole :]
    parts = [
        panels.view(num, heads, whole // panel, size // word, panel, word).permute(
            0, 3, 5, 1, 2, 4
        ),
        rest.view(num, heads, size // word, dim - whole, word).permute(0, 2, 4, 1, 3),
    ]
    return [part for part in parts if part.numel()]


def scale_view(region: torch.Tensor, layout: KvLayout, heads: int) -> torch.Tensor:
    """A view [num_blocks, block_size, heads] of a region of scales."""
    size = layout.block_size
    if layout.word:
        return region.view(-1, heads, size).transpose(1, 2)
    return region.view(-1, size, heads)
