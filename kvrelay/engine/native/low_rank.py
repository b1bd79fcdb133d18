"""The low-rank kernel as a function of tensors, and the factors as it reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvrelay.engine.native import arguments as args
from kvrelay.engine.native.arguments import DTYPES
from kvrelay.engine.native.ops import PANEL, as_rows
from kvrelay.engine.native.program import call


class FactorTable:
    """The factors of all adapters for one layer, by slot. Captured kernel calls keep the address of
    `struct`.
    """

    def __init__(self, slots: int) -> None:
        self.struct = (args.LowRankFactors * slots)()
        self._held: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * slots

    def set(self, slot: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Takes a [rank, inputs] and the panels of b [outputs, rank], both of the model's dtype and
        contiguous.
        """
        self._held[slot] = a, b
        self.struct[slot] = args.LowRankFactors(a.data_ptr(), b.data_ptr(), len(a), scale)

    def clear(self, slot: int) -> None:
        """The adapter in the slot does not change the layer."""
        self.struct[slot] = args.LowRankFactors()
        self._held[slot] = None


def panels_of(b: torch.Tensor) -> torch.Tensor:
    """b [outputs, rank] -> [outputs / 32 rounded up, rank, 32], padded with zeros."""
    outputs, rank = b.shape
    padded = b.new_zeros(-(-outputs // PANEL) * PANEL, rank)
    padded[:outputs] = b
    return padded.view(-1, PANEL, rank).transpose(1, 2).contiguous()


def add_low_rank(
    x: torch.Tensor, y: torch.Tensor, adapters: args.AdapterRows, factors: Any
) -> None:
    """Adds the updates of the rows that have an adapter to y in place.

    x [..., inputs]; y [..., outputs] is contiguous. `factors` is the struct of a FactorTable.
    """
    assert y.is_contiguous(), "the kernel writes to y itself"
    _call(x, y, adapters, factors, y.shape[-1], y.shape[-1], PANEL)


def add_low_rank_to_panels(
    x: torch.Tensor, y: torch.Tensor, adapters: args.AdapterRows, factors: Any, outputs: int
) -> None:
    """Like `add_low_rank`, where y is [rows, outputs / 32 rounded up, 32], with any strides between
    rows and between panels.
    """
    assert y.shape[-1] == PANEL, "a panel has 32 columns"
    assert y.stride(2) == 1, "the columns of a panel are contiguous"
    _call(x, y, adapters, factors, outputs, y.stride(0), y.stride(1))


def _call(
    x: torch.Tensor,
    y: torch.Tensor,
    adapters: args.AdapterRows,
    factors: Any,
    outputs: int,
    y_stride: int,
    panel_stride: int,
) -> None:
    assert x.dtype == y.dtype, "the kernel reads both as one type"
    rows = as_rows(x)
    call(
        "kvrelay_low_rank",
        args.LowRankCall(
            adapters=ctypes.pointer(adapters),
            factors=factors,
            x=rows.data_ptr(),
            y=y.data_ptr(),
            inputs=rows.shape[1],
            outputs=outputs,
            x_stride=rows.stride(0),
            y_stride=y_stride,
            panel_stride=panel_stride,
            dtype=DTYPES[x.dtype],
        ),
    )
