"""Attention on a GPU by flashinfer (Ye et al., 2025), whose kernels read KV in the blocks where it
lies.
"""

from __future__ import annotations

import importlib
import importlib.util
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.attention.packed_step import PackedStep
from kvrelay.engine.attention.ragged_batch import store
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import OnLayer, Part, Step
from kvrelay.types import LayerKv

HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
# Query heads of a KV head: so many are one tile of a decode step, more would take larger tiles
MAX_GROUP = 16


class DoesNotFit(Exception):
    """The model asks for what these kernels do not do."""


@dataclass(frozen=True, slots=True)
class Room:
    """The most that steps need."""

    query_heads: int  # of a layer
    processors: int  # streaming multiprocessors of the GPU
    sequences: int  # of a recorded step
    blocks: int  # of all of these together


class FlashInfer:
    """One kind of kernel does both jobs: to decode is to prefill one token. It wants a plan for
    each step, and one for each kind of attention that the model's layers use; these become known
    when they first run.

    A plan is made on the host, in pinned memory that the next one overwrites: by then the step
    before must be over.
    """

    def __init__(self, kv: KvPool, room: Room) -> None:
        """Raises DoesNotFit."""
        self._wrapper_type = _wrapper_type(kv, room.query_heads)
        self._kv = kv
        self._query_heads = room.query_heads
        # All plans share these two: steps run one after the other, and each is planned before it
        # runs.
        self._workspace = self._buffer(
            max(_workspace_bytes(layer, room) for layer in kv.layout.layers), torch.uint8
        )
        self._indices = self._buffer(room.blocks, torch.int32)
        self._ragged = _Batch(kv, self._wrapper)

    def width(self, step: Step) -> int:
        """No block tables among the step's inputs: the plan has them."""
        return 0

    def ragged(self, inputs: PackedStep, step: Step) -> _Batch:
        self._ragged.slots = inputs.slots
        self._ragged.on_layer = step.on_layer
        self._ragged.update(step.parts)
        return self._ragged

    def decoding(self, inputs: PackedStep) -> _Batch:
        batch = _Batch(self._kv, lambda kind: self._recordable_wrapper(kind, inputs.shape.parts))
        batch.slots = inputs.slots
        return batch

    def _recordable_wrapper(self, kind: _Kind, sequences: int) -> Any:
        """Whose plans are all for so many sequences, and lie where the first one lay."""
        return self._wrapper(
            kind,
            use_cuda_graph=True,
            qo_indptr_buf=self._buffer(sequences + 1, torch.int32),
            paged_kv_indptr_buf=self._buffer(sequences + 1, torch.int32),
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._buffer(sequences, torch.int32),
        )

    def _wrapper(self, kind: _Kind, **fixed: Any) -> Any:
        if kind.heads > self._query_heads:
            raise DoesNotFit(
                f"a layer has {kind.heads} query heads, and the configuration says "
                f"{self._query_heads}"
            )
        # Of its backends the one that splits long sequences even where there are few queries.
        return self._wrapper_type(self._workspace, "NHD", backend="fa2", **fixed)

    def _buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._kv.buffer.device)


def _wrapper_type(kv: KvPool, query_heads: int) -> Any:
    if kv.layout.dtype not in DTYPES:
        raise DoesNotFit(
            f"flashinfer is for KV of {' or '.join(DTYPES)}, and the model's is {kv.layout.dtype}"
        )
    for layer in kv.layout.layers:
        if layer.k_dim != layer.v_dim or layer.k_dim not in HEAD_DIMS:
            raise DoesNotFit(
                f"flashinfer is for heads of {HEAD_DIMS} values, not {layer.k_dim} "
                f"and {layer.v_dim}"
            )
        if query_heads > MAX_GROUP * layer.kv_heads:
            raise DoesNotFit(
                f"{query_heads} query heads share {layer.kv_heads} KV heads, at most "
                f"{MAX_GROUP} each may"
            )
    if importlib.util.find_spec("flashinfer") is None:
        raise DoesNotFit("flashinfer is not installed")
    return importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper


def _workspace_bytes(layer: LayerKv, room: Room) -> int:
    """Of partial sums: a float32 for each value and one more for each row, of all tiles, of all
    query heads.

    A plan (flashinfer's scheduler.cuh) makes no more tiles than run at a time, two on each
    processor for all KV heads together, of up to 128 rows; or, in a recorded step, up to two for
    each sequence, of 16 rows.
    """
    rows = max(2 * room.processors // layer.kv_heads * 128, 2 * room.sequences * 16)
    return room.query_heads * rows * (layer.v_dim + 1) * 4 + 2**10  # and what alignment takes


@dataclass(frozen=True, slots=True)
class Pages:
    """Sequences' new tokens and blocks, one after the other. int32; on the host, but for the blocks
    themselves.
    """

    qo_indptr: torch.Tensor  # [P + 1]: where each sequence's new tokens begin, and the end
    kv_indptr: torch.Tensor  # [P + 1]: likewise for blocks
    indices: torch.Tensor  # [kv_indptr[P]]: the blocks
    last_page_len: torch.Tensor  # [P]: tokens in each sequence's last block

    @classmethod
    def of(cls, parts: Sequence[Part], block_size: int, device: torch.device) -> Pages:
        qo_indptr, kv_indptr, indices, last_page_len = (
            array("i", [0]),
            array("i", [0]),
            array("i"),
            array("i"),
        )
        for part in parts:
            last = (part.end - 1) // block_size
            indices.extend(part.blocks[: last + 1])
            qo_indptr.append(part.row + part.new)
            kv_indptr.append(len(indices))
            last_page_len.append(part.end - last * block_size)
        blocks = _tensor(indices)
        if device.type == "cuda":
            blocks = blocks.pin_memory().to(device, non_blocking=True)
        return cls(_tensor(qo_indptr), _tensor(kv_indptr), blocks, _tensor(last_page_len))


def _tensor(values: array[int]) -> torch.Tensor:
    return torch.frombuffer(values, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Attention of one or more layers that shares a plan."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float


class _Batch:
    """A step, or the same memory for many. `slots` [T] are where the new tokens' KV goes."""

    slots: torch.Tensor
    on_layer: OnLayer | None = None

    def __init__(self, kv: KvPool, new_wrapper: Callable[[_Kind], Any]) -> None:
        self._kv = kv
        self._new_wrapper = new_wrapper
        self._wrappers: dict[_Kind, Any] = {}
        self._pages: Pages | None = None

    def batch(self) -> _Batch:
        return self

    def update(self, parts: Sequence[Part]) -> None:
        self._pages = Pages.of(parts, self._kv.layout.block_size, self._kv.buffer.device)
        for kind, wrapper in self._wrappers.items():
            self._plan(kind, wrapper)

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
        """As `attention.Batch` says. Raises DoesNotFit."""
        if sinks is not None:
            raise DoesNotFit("flashinfer does not know attention sinks")
        layer = self._kv.layers[layer_index]
        store(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self.on_layer is not None:
            self.on_layer(layer_index)
        kind = _Kind(
            query.shape[1], key.shape[1], query.shape[3], query.dtype, scale, window, softcap
        )
        if kind not in self._wrappers:
            self._wrappers[kind] = self._new_wrapper(kind)
            self._plan(kind, self._wrappers[kind])
        q = query[0].transpose(0, 1).contiguous()  # [T, Hq, D]
        out: torch.Tensor = self._wrappers[kind].run(q, (layer.k, layer.v), out=torch.empty_like(q))
        return out[None]

    def _plan(self, kind: _Kind, wrapper: Any) -> None:
        assert self._pages is not None, "update comes first"
        wrapper.plan(
            self._pages.qo_indptr,
            self._pages.kv_indptr,
            self._pages.indices,
            self._pages.last_page_len,
            kind.heads,
            kind.kv_heads,
            kind.dim,
            self._kv.layout.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=kind.window - 1,  # keys to the left of a query's own; -1 is all
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
