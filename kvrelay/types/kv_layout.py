"""Layout of a KV block: its layers, heads, dtypes and bytes. Frozen, slotted, without I/O."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# Dtype of the scales of quantised values.
SCALE_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class LayerKv:
    """KV of one layer and one token: `kv_heads` vectors of `k_dim` values, and as many of `v_dim`
    values.
    """

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class KvRegion:
    """One tensor of all blocks: [num_blocks, *block_shape] of `dtype`, row-major."""

    block_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of KV in an arena of bytes: region after region, without gaps.

    In each region, block n begins at n times the region's block bytes. So a run of adjacent blocks
    is one contiguous range per region. int8 is quantised, with one scale for each token's vector in
    each head; the scales are in separate regions.

    Within a block, tokens follow each other: [block_size, kv_heads, dim]. If `word` is set, it is
    the number of values per four-byte packed element, in the dtype that the model attends in. Then
    heads come first, and the order is the one that the CPU kernels read (see
    `engine/native/kernels/panels.h`).

    With tensor parallelism, each rank has an equal share of the heads in its own arena. The arenas
    follow each other. Block n of the whole consists of block n of each arena.
    """

    # With the heads of all ranks.
    layers: tuple[LayerKv, ...]
    # Tokens.
    block_size: int
    # Dtype of K and V.
    dtype: str
    word: int | None = None
    ranks: int = 1

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> KvLayout:
        """Returns the layout from the plain data that `dataclasses.asdict` makes of it."""
        layers = tuple(LayerKv(**layer) for layer in fields["layers"])
        return cls(**{**fields, "layers": layers})

    @property
    def regions(self) -> tuple[KvRegion, ...]:
        """K of layer 0, V of layer 0, K of layer 1, and so on. With quantised KV, the scales come
        first, in the same order.

        The scales come first because they are wider: so every region is aligned for any number of
        blocks. The list repeats for each rank.
        """
        return self._regions_of_rank * self.ranks

    @property
    def share(self) -> KvLayout:
        """The layout of one rank's arena."""
        if self.ranks == 1:
            return self
        layers = tuple(
            replace(layer, kv_heads=layer.kv_heads // self.ranks) for layer in self.layers
        )
        return replace(self, layers=layers, ranks=1)

    @property
    def _regions_of_rank(self) -> tuple[KvRegion, ...]:
        layers = self.share.layers
        scales = [
            KvRegion(self._scale_shape(layer), SCALE_DTYPE)
            for layer in layers
            for _ in ("k", "v")
            if self.dtype == "int8"
        ]
        values = [
            KvRegion(shape, self.dtype)
            for layer in layers
            for shape in (self._k_shape(layer), self._v_shape(layer))
        ]
        return (*scales, *values)

    def _scale_shape(self, layer: LayerKv) -> tuple[int, ...]:
        return (layer.kv_heads, self.block_size) if self.word else (self.block_size, layer.kv_heads)

    def _k_shape(self, layer: LayerKv) -> tuple[int, ...]:
        if self.word:
            return (layer.kv_heads, self.block_size * layer.k_dim)
        return (self.block_size, layer.kv_heads, layer.k_dim)

    def _v_shape(self, layer: LayerKv) -> tuple[int, ...]:
        if self.word:
            return (layer.kv_heads, self.block_size * layer.v_dim)
        return (self.block_size, layer.kv_heads, layer.v_dim)

    @property
    def region_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each region."""
        return tuple(
            math.prod(region.block_shape) * DTYPE_BYTES[region.dtype] for region in self.regions
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions of all ranks."""
        return sum(self.region_block_bytes)

    def arena_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of an arena with `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def hash(self, model_id: str) -> str:
        """Returns a hash that is equal on two workers if and only if they can exchange blocks
        without conversion.
        """
        text = f"{model_id}|{self.layers}|{self.block_size}|{self.dtype}|{self.word}|{self.ranks}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens, rounded up."""
        return math.ceil(num_tokens / self.block_size)
