"""Attention on a GPU by flashinfer (Ye et al., 2025). Its kernels read KV directly from the
blocks.
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
from kvrelay.types.kv_layout import LayerKv

HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
# Query heads per KV head. A decode step handles this many in one tile; more heads would need larger
# tiles.
MAX_GROUP = 16


class DoesNotFit(Exception):
    """The flashinfer kernels do not support the model."""


@dataclass(frozen=True, slots=True)
class Room:
    """The largest steps that the workspace must hold."""

    # Query heads of a layer.
    query_heads: int
    # Streaming multiprocessors of the GPU.
    processors: int
    # Sequences in a captured step.
    sequences: int
    # Blocks of all sequences of a captured step together.
    blocks: int


class FlashInfer:
    """Attention by flashinfer's prefill kernels, which also decode: a decode step prefills one
    token.

    flashinfer needs a plan for each step and for each kind of attention in the model's layers. A
    kind becomes known when a layer of that kind first runs.

    A plan is made on the host, in pinned memory that the next plan overwrites. The previous step
    must be complete by then.
    """

    def __init__(self, kv: KvPool, room: Room) -> None:
        """Allocates the workspace. Raises DoesNotFit if the kernels do not support `kv` or the
        model.
        """
        self._wrapper_type = _wrapper_type(kv, room.query_heads)
        self._kv = kv
        self._query_heads = room.query_heads
        # All plans share the workspace and the indices: steps run one after another, and each step
        # is planned before it runs.
        self._workspace = self._buffer(
            max(_workspace_bytes(layer, room) for layer in kv.layout.layers), torch.uint8
        )
        self._indices = self._buffer(room.blocks, torch.int32)
        self._ragged = _Batch(kv, self._wrapper)

    def ragged(self, inputs: PackedStep, step: Step) -> _Batch:
        """Plans a step with any number of new tokens per sequence. The next call overwrites the
        plan.
        """
        self._ragged.slots = inputs.slots
        self._ragged.on_layer = step.on_layer
        self._ragged.update(step.parts)
        return self._ragged

    def decoding(self, inputs: PackedStep) -> _Batch:
        """The attention of a captured step of one new token per sequence. It reads the slots in
        `inputs`.
        """
        sequences = len(inputs.token_ids)
        batch = _Batch(self._kv, lambda kind: self._recordable_wrapper(kind, sequences))
        batch.slots = inputs.slots
        return batch

    def _recordable_wrapper(self, kind: _Kind, sequences: int) -> Any:
        """A wrapper whose plans are all for `sequences` sequences and stay in the same memory."""
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
                f"a layer has {kind.heads} query heads, and the configuration has "
                f"{self._query_heads}"
            )
        # fa2 is the backend that splits long sequences even when there are few queries.
        return self._wrapper_type(self._workspace, "NHD", backend="fa2", **fixed)

    def _buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._kv.buffer.device)


def _wrapper_type(kv: KvPool, query_heads: int) -> Any:
    if kv.layout.dtype not in DTYPES:
        raise DoesNotFit(
            f"flashinfer supports KV in {' and '.join(DTYPES)}, and the model has {kv.layout.dtype}"
        )
    for layer in kv.layout.layers:
        if layer.k_dim != layer.v_dim or layer.k_dim not in HEAD_DIMS:
            raise DoesNotFit(
                f"flashinfer supports head dimensions {HEAD_DIMS}, and the model has "
                f"{layer.k_dim} and {layer.v_dim}"
            )
        if query_heads > MAX_GROUP * layer.kv_heads:
            raise DoesNotFit(
                f"{query_heads} query heads share {layer.kv_heads} KV heads; flashinfer allows "
                f"at most {MAX_GROUP} per KV head"
            )
    if importlib.util.find_spec("flashinfer") is None:
        raise DoesNotFit("flashinfer is not installed")
    return importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper


def _workspace_bytes(layer: LayerKv, room: Room) -> int:
    """Bytes of partial sums: a float32 for each value and one more for each row, over all tiles and
    query heads.

    A plan (flashinfer's scheduler.cuh) makes no more tiles than run at a time: two on each
    processor for all KV heads together, of up to 128 rows. In a captured step it makes up to two
    tiles for each sequence, of 16 rows.
    """
    rows = max(2 * room.processors // layer.kv_heads * 128, 2 * room.sequences * 16)
    # The last term is for alignment.
    return room.query_heads * rows * (layer.v_dim + 1) * 4 + 2**10


@dataclass(frozen=True, slots=True)
class Pages:
    """New tokens and blocks of all sequences, concatenated. int32; on the host, except for
    `indices`, which are on the device.
    """

    # [P + 1]: offset of each sequence's first new token, then the total.
    qo_indptr: torch.Tensor
    # [P + 1]: offset of each sequence's first block, then the total.
    kv_indptr: torch.Tensor
    # [kv_indptr[P]]: the blocks.
    indices: torch.Tensor
    # [P]: tokens in each sequence's last block.
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, parts: Sequence[Part], block_size: int, device: torch.device) -> Pages:
        """The arrays for `parts`. A copy to a GPU is asynchronous, from pinned memory."""
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
    """The kind of attention of one or more layers, which share a plan."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float


class _Batch:
    """One step, or many steps in the same memory. `slots` [T] hold where the new tokens' KV
    goes.
    """

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
        """See `paged_attention.Batch`. Raises DoesNotFit for attention sinks."""
        if sinks is not None:
            raise DoesNotFit("flashinfer does not support attention sinks")
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
        # K and V: KV with scales, and V that is in K, are refused.
        out: torch.Tensor = self._wrappers[kind].run(q, layer.regions, out=torch.empty_like(q))
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
            # The number of keys left of the query's own; -1 is unbounded.
            window_left=kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
