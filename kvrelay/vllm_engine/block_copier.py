"""Copies KV blocks between vLLM's memory and the staging memory that hand-offs read and write.

The bytes of a block keep the order that vLLM's attention gives them. So only workers with the same
vLLM and the same attention kernels can exchange them; see `VllmModel.model_id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvrelay.engine.base.kv_memory import TORCH_DTYPE, KvPool
from kvrelay.errors import ModelRefused
from kvrelay.types.kv_layout import KvLayout, LayerKv

_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items() if dtype.is_floating_point}


def layout_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int) -> KvLayout:
    """Returns the layout of the staging memory: in each layer, the first half of a block's bytes
    as K and the second half as V, whatever they are.

    kv_caches: [num_blocks, ...] of each layer. Raises ModelRefused for tensors with another first
    size, whose blocks are not contiguous, cannot be halved, or have another dtype than the others.
    """
    layers = []
    dtypes = {tensor.dtype for tensor in kv_caches.values()}
    if len(dtypes) != 1 or not dtypes <= _NAME.keys():
        found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "no KV"
        raise ModelRefused(f"the hand-off does not support a KV cache of {found}")
    for name, tensor in kv_caches.items():
        values, odd = divmod(tensor[0].numel(), 2 * block_size)
        if odd or len(tensor) != num_blocks or not tensor[0].is_contiguous():
            raise ModelRefused(f"the hand-off does not support the KV cache of layer {name}")
        layers.append(LayerKv(1, values, values))
    return KvLayout(tuple(layers), block_size, _NAME[dtypes.pop()])


class BlockCopier:
    """Copies blocks of all layers. Used by the engine's thread."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], staging: KvPool) -> None:
        # [blocks, values of a block] for each layer.
        self._caches = [tensor.flatten(1) for tensor in kv_caches.values()]
        # K and V of each layer.
        self._staging = [[one.flatten(1) for one in layer.regions] for layer in staging.layers]

    def save(self, blocks: Sequence[int], staging: Sequence[int]) -> None:
        """Copies vLLM's `blocks` to the staging blocks of the same place."""
        source, target = torch.tensor(blocks), torch.tensor(staging)
        for cache, (k, v) in zip(self._caches, self._staging, strict=True):
            values = cache.index_select(0, source.to(cache.device)).to(k.device)
            k.index_copy_(0, target, values[:, : k.shape[1]])
            v.index_copy_(0, target, values[:, k.shape[1] :])

    def load(self, blocks: Sequence[int], staging: Sequence[int]) -> None:
        """Copies staging blocks to vLLM's `blocks` of the same place."""
        source, target = torch.tensor(staging), torch.tensor(blocks)
        for cache, (k, v) in zip(self._caches, self._staging, strict=True):
            values = torch.cat((k.index_select(0, source), v.index_select(0, source)), dim=1)
            cache.index_copy_(0, target.to(cache.device), values.to(cache.device))
