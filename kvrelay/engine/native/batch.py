"""The attention kernels' description of a step: the new tokens, and the blocks of their
sequences.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import partial

import torch

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import OnLayer, Part, show_queries
from kvrelay.engine.native import arguments as args
from kvrelay.engine.native.arguments import DTYPES
from kvrelay.engine.native.ops import FLOATS
from kvrelay.engine.native.program import aside, call, empty
from kvrelay.types.kv_layout import KvLayout

KEYS, VALUES = 0, 1
# New tokens. A shorter step is not interrupted for layer callbacks.
TOLD_FROM = 64


class PagedBatch:
    """The batch of all steps. Captured calls keep its address, and `update` replaces its contents
    before each step.
    """

    def __init__(self, kv: KvPool, *, watched: bool = False) -> None:
        """watched: whether captured steps tell the queries of parts that ask for them. Other steps
        always do.
        """
        self._kv = kv
        self._watched = watched
        # Parts that ask for the queries of this step.
        self._asking: list[Part] = []
        self._struct = args.Batch()
        self._held: tuple[array[int], ...] = ()
        self._on_layer: OnLayer | None = None

    @staticmethod
    def suits(layout: KvLayout, dtype: torch.dtype) -> bool:
        """True if the kernels can read KV of this layout and dtype; `layout` in token order."""
        words = all(layer.k_dim * dtype.itemsize % 4 == 0 for layer in layout.layers)
        return dtype in FLOATS and layout.block_size % 16 == 0 and words

    def update(self, parts: Sequence[Part], on_layer: OnLayer | None = None) -> None:
        """Takes the next step's parts. `on_layer` is called for steps of TOLD_FROM or more new
        tokens.
        """
        self._on_layer = on_layer
        self._asking = [part for part in parts if part.queries is not None]
        tables = array("i")
        described = array("q")
        for part in parts:
            described.extend((part.row, part.new, part.past, len(tables)))
            tables.extend(part.blocks)
        self._held = (described, tables)
        self._struct.num_parts = len(parts)
        self._struct.parts = ctypes.cast(described.buffer_info()[0], ctypes.POINTER(args.Part))
        self._struct.tables = ctypes.cast(tables.buffer_info()[0], ctypes.POINTER(ctypes.c_int32))

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
        """Stores the new keys and values, then attends.

        query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]; sinks
        [Hq]. window 0 is unbounded; softcap 0 is none.
        """
        layer = self._kv.layers[layer_index]
        self._store(KEYS, key, layer.k, layer.k_scale)
        if layer.v is not None:
            self._store(VALUES, value, layer.v, layer.v_scale)
        if query.shape[2] >= TOLD_FROM:
            aside(lambda: self._tell(layer_index))
        sinks = None if sinks is None else sinks.float().contiguous()
        query = query if query.stride(3) == 1 else query.contiguous()
        if self._watched or self._asking:
            aside(partial(self._show, layer_index, scale), query)
        if self._kv.layout.dtype == "int4":
            query = _rotated(query)
        y = empty((1, query.shape[2], query.shape[1], value.shape[3]), query.dtype)
        call(
            "kvrelay_attend",
            args.AttendCall(
                batch=ctypes.pointer(self._struct),
                q=query.data_ptr(),
                k=layer.k.data_ptr(),
                v=_address(layer.v),
                k_scale=_address(layer.k_scale),
                v_scale=_address(layer.v_scale),
                sinks=_address(sinks),
                y=y.data_ptr(),
                kv_heads=key.shape[1],
                group=query.shape[1] // key.shape[1],
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                block_size=self._kv.layout.block_size,
                q_token_stride=query.stride(2),
                q_head_stride=query.stride(1),
                window=window,
                dtype=DTYPES[query.dtype],
                kv_dtype=DTYPES[layer.k.dtype],
                scale=scale,
                softcap=softcap,
            ),
        )
        return y

    def _tell(self, layer_index: int) -> None:
        if self._on_layer is not None:
            self._on_layer(layer_index)

    def _show(self, layer_index: int, scale: float, query: torch.Tensor) -> None:
        """query [1, Hq, T, Dk]."""
        show_queries(self._asking, layer_index, query, scale)

    def _store(
        self, side: int, new: torch.Tensor, region: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        new = new if new.stride(3) == 1 else new.contiguous()
        call(
            "kvrelay_store",
            args.StoreCall(
                batch=ctypes.pointer(self._struct),
                x=new.data_ptr(),
                to=region.data_ptr(),
                scale=_address(scale),
                heads=new.shape[1],
                dim=new.shape[3],
                block_size=self._kv.layout.block_size,
                token_stride=new.stride(2),
                head_stride=new.stride(1),
                x_dtype=DTYPES[new.dtype],
                to_dtype=DTYPES[region.dtype],
                side=side,
            ),
        )


def _rotated(query: torch.Tensor) -> torch.Tensor:
    """[1, Hq, T, Dk], rotated as int4 keys are."""
    _, heads, rows, dim = query.shape
    y = empty((rows, heads, dim), query.dtype)
    call(
        "kvrelay_rotate",
        args.RotateCall(
            x=query.data_ptr(),
            y=y.data_ptr(),
            rows=rows,
            heads=heads,
            dim=dim,
            token_stride=query.stride(2),
            head_stride=query.stride(1),
            dtype=DTYPES[query.dtype],
        ),
    )
    return y.transpose(0, 1)[None]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
