"""Products of vectors with the keys of a sequence, in the order in which the keys are stored."""

from __future__ import annotations

import torch

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.quantised_kv import dequantise
from kvrelay.engine.base.token_views import PANEL, scale_view, token_views


class StoredKeys:
    """The keys of one memory. `blocks` [n] int64 is a sequence's block table, and `count` the
    number of its keys.
    """

    def __init__(self, kv: KvPool) -> None:
        self._kv = kv
        self._layout = kv.layout
        # Values of a word that follow each other in the kernels' order.
        self._word = kv.layout.word or 1

    def keys(self, layer_index: int, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """The keys of a layer: float32 [Hkv, count, Dk]."""
        layer, shape = self._kv.layers[layer_index], self._layout.share.layers[layer_index]
        used = blocks[: self._layout.blocks_for(count)]
        values = token_views(layer.k[used], self._layout, shape, keys=True)[0]
        keys = values.reshape(len(used) * self._layout.block_size, shape.kv_heads, -1)[:count]
        if layer.k_scale is None:
            return keys.float().transpose(0, 1)
        scales = scale_view(layer.k_scale[used], self._layout, shape.kv_heads)
        scales = scales.flatten(0, 1)[:count]
        return dequantise(keys, scales, torch.float32, keys=True).transpose(0, 1)

    def products(
        self, layer_index: int, blocks: torch.Tensor, count: int, vectors: torch.Tensor
    ) -> torch.Tensor:
        """vectors float32 [Hkv, R, Dk] -> their products with the keys, [Hkv, R, count]."""
        packed = self._packed(layer_index, blocks, count)
        if packed is None:
            return vectors @ self.keys(layer_index, blocks, count).transpose(1, 2)
        return self._product(packed, vectors)[..., :count]

    def lengths(
        self, layer_index: int, blocks: torch.Tensor, count: int, vectors: torch.Tensor
    ) -> torch.Tensor:
        """vectors float32 [Hkv, R, F] -> their products with the lengths of the keys' pairs,
        [Hkv, R, count]. A pair is value i and value i + F.
        """
        pairs = vectors.shape[-1]
        packed = self._packed(layer_index, blocks, count)
        if packed is None or pairs % self._word:
            keys = self.keys(layer_index, blocks, count)
            lengths = _lengths(keys[..., :pairs], keys[..., pairs : 2 * pairs])
            return vectors @ lengths.transpose(1, 2)
        rows = pairs // self._word
        lengths = _lengths(packed[..., :rows, :], packed[..., rows : 2 * rows, :])
        return self._product(lengths, vectors)[..., :count]

    def _packed(self, layer_index: int, blocks: torch.Tensor, count: int) -> torch.Tensor | None:
        """The keys in the kernels' order, float32 [n, Hkv, groups, Dk / word, group * word]; None
        if they are in another.
        """
        if self._layout.word is None or self._layout.dtype == "int4":
            return None
        layer, shape = self._kv.layers[layer_index], self._layout.share.layers[layer_index]
        used = blocks[: self._layout.blocks_for(count)]
        size, heads = self._layout.block_size, shape.kv_heads
        group = PANEL if size % PANEL == 0 else PANEL // 2
        outer = len(used), heads, size // group
        packed = layer.k[used].view(*outer, shape.k_dim // self._word, group * self._word).float()
        if layer.k_scale is None:
            return packed
        scales = layer.k_scale[used].float().view(*outer, 1, group, 1)
        return packed.mul_(scales.expand(-1, -1, -1, -1, -1, self._word).flatten(-2))

    def _product(self, packed: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """vectors [Hkv, R, D] and packed values [n, Hkv, groups, D / word, group * word] ->
        [Hkv, R, n * groups * group].

        A product in this order adds values of one place in their words. So the parts of the
        vectors for each place are multiplied with all places, and the right ones are taken.
        """
        heads, rows, dim = vectors.shape
        blocks, _, groups, _, columns = packed.shape
        word = self._word
        parts = vectors.view(heads, rows, dim // word, word).permute(0, 3, 1, 2)
        parts = parts.reshape(heads, 1, word * rows, dim // word)
        found = (parts @ packed).view(blocks, heads, groups, word, rows, columns // word, word)
        added = torch.diagonal(found, dim1=3, dim2=6).sum(dim=-1)
        return added.permute(1, 3, 0, 2, 4).reshape(heads, rows, -1)


def _lengths(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(real.square() + imaginary.square())
