"""The structures of `kernels/kernels.h`, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from enum import IntEnum

import torch

# A byte of torch.uint8 holds two values of int4 KV.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}


class Operation(IntEnum):
    """Operations of the elementwise kernel."""

    COPY = 0
    NEGATE = 1
    ADD = 2
    MULTIPLY = 3
    SILU = 4


class RowStep(Structure):
    """A kernel that computes some rows, and the address of its arguments."""

    _fields_ = [("kernel", c_void_p), ("call", c_void_p)]


class RowsCall(Structure):
    """Arguments of `kvrelay_run_rows`."""

    _fields_ = [
        ("steps", POINTER(RowStep)),
        *((name, c_int64) for name in ("count", "rows", "block")),
    ]


class LinearCall(Structure):
    """Arguments of `kvrelay_linear`. Strides in elements."""

    _fields_ = [
        (name, c_void_p)
        for name in ("x", "weight", "bias", "y", "x_scale", "weight_scale", "zero_sum")
    ] + [
        (name, c_int64)
        for name in ("rows", "inputs", "outputs", "x_stride", "weight_dtype", "y_dtype", "gated")
    ]


class QuantizeCall(Structure):
    """Arguments of `kvrelay_quantize`. Strides in elements."""

    _fields_ = [(name, c_void_p) for name in ("x", "y", "scale")] + [
        (name, c_int64) for name in ("columns", "x_stride", "x_dtype")
    ]


class RmsNormCall(Structure):
    """Arguments of `kvrelay_rms_norm`. Strides in elements."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "y")),
        *((name, c_int64) for name in ("columns", "x_stride", "dtype")),
        ("epsilon", c_double),
        ("weight_offset", c_double),
        ("round_before", c_int64),
    ]


class ElementwiseCall(Structure):
    """Arguments of `kvrelay_elementwise`. Sizes and strides have four dimensions; strides in
    elements.
    """

    _fields_ = [
        *((name, c_void_p) for name in ("a", "b", "y")),
        *((name, c_int64) for name in ("operation", "a_dtype", "b_dtype", "y_dtype")),
        *((name, c_int64 * 4) for name in ("size", "a_stride", "b_stride", "y_stride")),
    ]


class Part(Structure):
    """New tokens of one sequence: `table` is the index of its block table in `Batch.tables`."""

    _fields_ = [(name, c_int64) for name in ("row", "rows", "past", "table")]


class Batch(Structure):
    """A step's parts and all their block tables, concatenated."""

    _fields_ = [
        ("num_parts", c_int64),
        ("parts", POINTER(Part)),
        ("tables", POINTER(ctypes.c_int32)),
    ]


class StoreCall(Structure):
    """Arguments of `kvrelay_store`, which writes keys or values of new tokens to their blocks."""

    _fields_ = [
        ("batch", POINTER(Batch)),
        *((name, c_void_p) for name in ("x", "to", "scale")),
        *(
            (name, c_int64)
            for name in ("heads", "dim", "block_size", "token_stride", "head_stride")
        ),
        *((name, c_int64) for name in ("x_dtype", "to_dtype", "side")),
    ]


class RotateCall(Structure):
    """Arguments of `kvrelay_rotate`. Strides in elements."""

    _fields_ = [(name, c_void_p) for name in ("x", "y")] + [
        (name, c_int64) for name in ("rows", "heads", "dim", "token_stride", "head_stride", "dtype")
    ]


class AttendCall(Structure):
    """Arguments of `kvrelay_attend`. window 0 is unbounded; softcap 0 is none."""

    _fields_ = [
        ("batch", POINTER(Batch)),
        *((name, c_void_p) for name in ("q", "k", "v", "k_scale", "v_scale", "sinks", "y")),
        *((name, c_int64) for name in ("kv_heads", "group", "k_dim", "v_dim", "block_size")),
        *(
            (name, c_int64)
            for name in ("q_token_stride", "q_head_stride", "window", "dtype", "kv_dtype")
        ),
        ("scale", c_double),
        ("softcap", c_double),
    ]


class Step(Structure):
    """A kernel and the address of its arguments, for `kvrelay_run`."""

    _fields_ = [("kernel", c_void_p), ("call", c_void_p)]


class AdapterGroup(Structure):
    """Rows of the batch with the same adapter: `AdapterRows.rows` [first, first + count)."""

    _fields_ = [(name, c_int64) for name in ("first", "count", "slot")]


class AdapterRows(Structure):
    """The rows of a step that have an adapter, group after group."""

    _fields_ = [
        ("num_groups", c_int64),
        ("groups", POINTER(AdapterGroup)),
        ("rows", POINTER(c_int64)),
    ]


class LowRankFactors(Structure):
    """The factors of one adapter for one layer. Rank 0: the adapter does not change the layer."""

    _fields_ = [("a", c_void_p), ("b", c_void_p), ("rank", c_int64), ("scale", c_double)]


class LowRankCall(Structure):
    """Arguments of `kvrelay_low_rank`. Strides in elements."""

    _fields_ = [
        ("adapters", POINTER(AdapterRows)),
        ("factors", POINTER(LowRankFactors)),
        *((name, c_void_p) for name in ("x", "y")),
        *(
            (name, c_int64)
            for name in ("inputs", "outputs", "x_stride", "y_stride", "panel_stride", "dtype")
        ),
    ]
