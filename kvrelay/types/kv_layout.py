"""Layout of a KV block: its layers, heads, dtypes and bytes. Frozen, slotted, without I/O."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
# Dtypes of KV: as the model computes it, and quantised. The dtype of the scales of quantised KV.
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
QUANTISED = ("int8", "int4")
SCALE_DTYPE = "bfloat16"
# Attention kernels read whole rounds of keys: the most tokens of a round.
ROUND = 128
# Memory is given back to the system in whole pages.
PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class LayerKv:
    """KV of one layer and one token: `kv_heads` vectors K of `k_dim` values, and as many vectors V
    of `v_dim` values.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    # Whether V is the first v_dim values of K, as with latent attention. Such a V is not stored.
    v_in_k: bool = False

    def __repr__(self) -> str:
        # The hash of a layout contains it. Without `v_in_k` it is that of older workers.
        v_in_k = ", v_in_k=True" if self.v_in_k else ""
        return f"LayerKv(kv_heads={self.kv_heads}, k_dim={self.k_dim}, v_dim={self.v_dim}{v_in_k})"

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The dimension of each stored vector of a head: of K, and of V unless it is in K."""
        return (self.k_dim,) if self.v_in_k else (self.k_dim, self.v_dim)


def holds(dtype: str, layers: Iterable[LayerKv]) -> bool:
    """Whether KV of this dtype can hold the vectors. In int4, pairs of words of two values share
    bytes.
    """
    return dtype != "int4" or not any(dim % 4 for layer in layers for dim in layer.stored_dims)


def check_dtype(dtype: str, layers: Iterable[LayerKv]) -> None:
    """Raises ConfigError if KV of this dtype cannot hold the vectors."""
    if not holds(dtype, layers):
        raise ConfigError(
            "kv.dtype: int4 holds heads whose dimensions are multiples of 4, which those of this "
            "model are not; set int8 or auto"
        )


@dataclass(frozen=True, slots=True)
class KvRegion:
    """One tensor of all blocks: [num_blocks, *block_shape] of `dtype`, row-major."""

    block_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of KV in an arena of bytes: region after region, without gaps.

    In each region, block n begins at n times the region's block bytes. So a run of adjacent blocks
    is one contiguous range per region. int8 and int4 are quantised, with one scale for each token's
    vector in each head; the scales are in separate regions. A byte of int4 holds two values of a
    vector (`engine/base/quantised_kv.py`).

    Within a block, tokens follow each other: [block_size, kv_heads, dim]. If `word` is set, it is
    the number of values per four-byte packed element, in the dtype that the model attends in. Then
    heads come first, and the order is the one that the CPU kernels read (see
    `engine/native/kernels/panels.h`).

    With tensor parallelism, each rank has an equal share of the heads in its own arena. The arenas
    follow each other. Block n of the whole consists of block n of each arena.

    If `windows` is set, a block may lack the KV of its windowed layers: those of a sequence need
    only the blocks from `first_block` on. `with_windows` sets it if that saves memory.
    """

    # With the heads of all ranks.
    layers: tuple[LayerKv, ...]
    # Tokens.
    block_size: int
    # Dtype of K and V, one of FLOAT_DTYPES or QUANTISED.
    dtype: str
    word: int | None = None
    ranks: int = 1
    # The tokens that each layer attends to, 0 for all. Empty if blocks keep the KV of all layers.
    windows: tuple[int, ...] = ()

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> KvLayout:
        """Returns the layout from the plain data that `dataclasses.asdict` makes of it."""
        layers = tuple(LayerKv(**layer) for layer in fields["layers"])
        return cls(**{**fields, "layers": layers, "windows": tuple(fields.get("windows", ()))})

    @property
    def is_quantised(self) -> bool:
        """Whether K and V have scales."""
        return self.dtype in QUANTISED

    @property
    def stored_dtype(self) -> str:
        """The dtype of the regions of K and V."""
        return "uint8" if self.dtype == "int4" else self.dtype

    @property
    def regions(self) -> tuple[KvRegion, ...]:
        """K of layer 0, V of layer 0, K of layer 1, and so on. A V that is in K has no region. With
        quantised KV, the scales come first, in the same order.

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
            for _ in layer.stored_dims
            if self.is_quantised
        ]
        values = [
            KvRegion(self._shape(layer.kv_heads, dim), self.stored_dtype)
            for layer in layers
            for dim in layer.stored_dims
        ]
        return (*scales, *values)

    def _scale_shape(self, layer: LayerKv) -> tuple[int, ...]:
        return (layer.kv_heads, self.block_size) if self.word else (self.block_size, layer.kv_heads)

    def _shape(self, heads: int, dim: int) -> tuple[int, ...]:
        """The block shape of K or V: int4 has two values in a byte."""
        width = dim // 2 if self.dtype == "int4" else dim
        if self.word:
            return (heads, self.block_size * width)
        return (self.block_size, heads, width)

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

    @property
    def window(self) -> int:
        """The tokens that windowed layers attend to, the most of all; 0 without such layers."""
        return max(self.windows, default=0)

    @property
    def region_layers(self) -> tuple[int, ...]:
        """The number of the layer that each region belongs to, in the order of `regions`."""
        numbers = [number for number, one in enumerate(self.layers) for _ in one.stored_dims]
        return (*numbers,) * (2 if self.is_quantised else 1) * self.ranks

    @property
    def windowed_regions(self) -> tuple[int, ...]:
        """The numbers of the regions of windowed layers."""
        return tuple(
            region
            for region, layer in enumerate(self.region_layers)
            if self.windows and self.windows[layer]
        )

    def with_windows(self, windows: tuple[int, ...]) -> KvLayout:
        """The layout with these windows, if a block without its windowed part takes less memory;
        else this one.
        """
        found = replace(self, windows=windows)
        unwindowed, windowed = found.part_bytes
        saves = windowed and unwindowed + found.lasting_bytes < self.block_bytes
        return found if saves else self

    @property
    def lasting_bytes(self) -> int:
        """Bytes of one block that do not go back to the system, in layouts with windows: those of
        regions in which a block is no number of whole pages, as of scales.
        """
        return sum(size for size in self.region_block_bytes if size % PAGE)

    @property
    def part_bytes(self) -> tuple[int, int]:
        """Returns the bytes that a block counts for without its windowed part, and the bytes of
        the windowed part. Neither contains the lasting bytes.

        The first number is at least a 16th of the second, so that memory has a bounded number of
        blocks. It is also at least 7 times the lasting bytes, so that these take at most an eighth
        of the memory.
        """
        if not self.windows:
            return self.block_bytes, 0
        sizes = self.region_block_bytes
        windowed = sum(sizes[one] for one in self.windowed_regions if not sizes[one] % PAGE)
        lasting = self.lasting_bytes
        unwindowed = self.block_bytes - windowed - lasting
        return max(unwindowed, -(-windowed // 16), 7 * lasting), windowed

    @property
    def _alignment(self) -> int:
        """Every region of an arena begins at a page if the number of blocks is a multiple of this
        number.
        """
        return math.lcm(*(PAGE // math.gcd(size, PAGE) for size in self.region_block_bytes))

    def num_blocks_in(self, num_bytes: int) -> int:
        """The number of blocks of a memory. With windows, of blocks without their windowed parts,
        rounded up so that all regions of an arena begin at a page.
        """
        if not self.windows:
            return num_bytes // self.block_bytes
        blocks = -(-num_bytes // (self.part_bytes[0] + self.lasting_bytes))
        return -(-blocks // self._alignment) * self._alignment

    def bytes_for_parts(self, num_bytes: int) -> int:
        """What a memory has for the parts of its blocks: with windows, all but the lasting bytes of
        all blocks.
        """
        lasting = self.num_blocks_in(num_bytes) * self.lasting_bytes if self.windows else 0
        return max(0, num_bytes - lasting)

    def most_windowed(self, step_tokens: int) -> int:
        """The most blocks of a sequence whose windowed layers are needed at a time, in steps of up
        to `step_tokens` new tokens.
        """
        return self.blocks_for(self.window + ROUND + step_tokens) + 1

    def sequence_bytes(self, num_tokens: int, step_tokens: int) -> int:
        """The memory that holds the KV of a sequence, with steps of up to `step_tokens` new
        tokens.
        """
        blocks = self.blocks_for(num_tokens)
        if not self.windows:
            return blocks * self.block_bytes
        unwindowed, windowed = self.part_bytes
        parts = blocks * unwindowed + min(blocks, self.most_windowed(step_tokens)) * windowed
        if not (lasting := self.lasting_bytes):
            return parts
        # `num_blocks_in` rounds up by fewer than `_alignment` blocks, and `bytes_for_parts`
        # subtracts their lasting bytes.
        parts += lasting * self._alignment
        return -(-parts * (unwindowed + lasting) // unwindowed)

    def kept_from(self, layer: int) -> int:
        """The first layer from `layer` on that keeps all tokens; the number of layers if there is
        none.
        """
        windows = self.windows or (0,) * len(self.layers)
        return next((at for at in range(layer, len(windows)) if not windows[at]), len(windows))

    def first_block(self, num_tokens: int) -> int:
        """The place of the first block whose windowed layers are needed after `num_tokens` tokens.
        All later ones are needed, too.
        """
        if not self.window:
            return 0
        return max(0, num_tokens + 1 - self.window) // ROUND * ROUND // self.block_size

    def arena_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of an arena with `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def hash(self, model_id: str) -> str:
        """Returns a hash that is equal on two workers if and only if they can exchange blocks
        without conversion.
        """
        text = f"{model_id}|{self.layers}|{self.block_size}|{self.dtype}|{self.word}|{self.ranks}"
        text += f"|{self.windows}" if self.windows else ""
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens, rounded up."""
        return math.ceil(num_tokens / self.block_size)
