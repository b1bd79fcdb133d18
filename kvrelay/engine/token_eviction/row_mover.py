"""Moves the KV rows of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.token_views import scale_view, token_views


class RowMover:
    """The KV rows of one memory. A slot is block * block_size + offset.

    Rows are moved as stored, so quantised KV is not rounded again.
    """

    def __init__(self, kv: KvPool) -> None:
        self._kv = kv
        self._size = kv.layout.block_size
        # For each region, as [num_blocks, n], the places of a token's values in a block:
        # [block_size, m].
        self._regions: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, shape in zip(kv.layers, kv.layout.share.layers, strict=True):
            keys = partial(self._values, layer=shape, keys=True)
            values = partial(self._values, layer=shape, keys=False)
            scales = partial(self._scales, heads=shape.kv_heads)
            for region, views in (
                (layer.k, keys),
                (layer.v, values),
                (layer.k_scale, scales),
                (layer.v_scale, scales),
            ):
                if region is not None:
                    places = _places(region, views, self._size)
                    self._regions.append((region.view(len(region), -1), places))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the rows of all layers from slots to other slots."""
        if not sources:
            return
        begin, end = torch.tensor(sources), torch.tensor(targets)
        from_blocks, from_offsets = begin[:, None] // self._size, begin % self._size
        to_blocks, to_offsets = end[:, None] // self._size, end % self._size
        for region, places in self._regions:
            region[to_blocks, places[to_offsets]] = region[from_blocks, places[from_offsets]]

    def _values(self, region: torch.Tensor, **of: object) -> list[torch.Tensor]:
        return token_views(region, self._kv.layout, **of)  # type: ignore[arg-type]

    def _scales(self, region: torch.Tensor, heads: int) -> list[torch.Tensor]:
        return [scale_view(region, self._kv.layout, heads)]


def _places(
    region: torch.Tensor, views: Callable[[torch.Tensor], list[torch.Tensor]], block_size: int
) -> torch.Tensor:
    """[block_size, m]: where the m values of each token are in a block of the region."""
    numbers = torch.arange(region[0].numel()).view(1, *region.shape[1:])
    return torch.cat([view.reshape(block_size, -1) for view in views(numbers)], dim=1)
