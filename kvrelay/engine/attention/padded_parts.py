"""Attention for sequences with one new token each, in one call, padded to the longest sequence."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.reference_attention import explicit_attention
from kvrelay.engine.base.kv_memory import LayerViews

# Bytes of keys and values that are gathered at a time.
KEY_BYTES = 512 * 2**20


class PaddedParts:
    """Rows [0, B) of a batch. No operation depends on values, so a captured graph can run on other
    values.

    Memory beyond a sequence's last token may hold anything and is not read. The last token is read
    in its place and masked.
    """

    row = 0

    def __init__(self, tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> None:
        """tables [B, W] int64: each sequence's blocks up to its new token, then any value;
        positions [B] int64 of the new tokens.
        """
        self._tables = tables
        self._positions = positions[:, None]
        self._block_size = block_size
        self._keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def new(self) -> int:
        """Number of rows B."""
        return len(self._tables)

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
        """query [Hkv, G, B, Dk] -> [Hkv, G, B, Dv]; sinks [Hkv, G]."""
        slots, seen = self.keys(window)
        values = sum(each[0, 0].numel() for each in (layer.k, layer.v) if each is not None)
        token_bytes = values * query.dtype.itemsize
        step = max(1, KEY_BYTES // (slots.shape[1] * token_bytes))
        outs = [
            _attend(layer, q, own_slots, own_seen, scale, softcap, sinks)
            for q, own_slots, own_seen in zip(
                torch.split(query.permute(2, 0, 1, 3), step),
                torch.split(slots, step),
                torch.split(seen, step),
                strict=True,
            )
        ]
        return torch.cat(outs).permute(1, 2, 0, 3)

    def keys(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [B, S] int64 of the keys of each new token, and a bool mask [B, S] of those that it
        attends to.

        S is the length that the tables hold, or the window if that is shorter. Window 0 is
        unbounded.
        """
        if window not in self._keys:
            room = self._tables.shape[1] * self._block_size
            length = min(window, room) if window else room
            first = (self._positions + 1 - length).clamp(min=0)
            positions = first + torch.arange(length, device=self._tables.device)
            seen = positions <= self._positions
            positions = torch.minimum(positions, self._positions)
            blocks = self._tables.gather(1, positions // self._block_size)
            self._keys[window] = blocks * self._block_size + positions % self._block_size, seen
        return self._keys[window]


def _attend(
    layer: LayerViews,
    q: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [B, Hkv, G, Dk] attends to the keys in slots [B, S] where seen [B, S] is true -> [B, Hkv,
    G, Dv].
    """
    k, v = layer.load(lambda region: region.flatten(0, 1)[slots], q.dtype)  # [B, S, Hkv, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = seen[:, None, None, :]
    if softcap or sinks is not None:
        return explicit_attention(q[..., None, :], k, v, scale, mask[..., None, :], softcap, sinks)[
            ..., 0, :
        ]
    # The query heads of a group are rows of one matrix product.
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
