"""The update that an adapter makes to the output of a linear layer: y += scale · (x Aᵀ) Bᵀ (LoRA,
Hu et al., 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.native.low_rank import FactorTable, add_low_rank, add_low_rank_to_panels


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The factors of one adapter for one layer, in the dtype of the model."""

    # [rank, inputs].
    a: torch.Tensor
    # [outputs, rank], or the panels of this for the native kernels.
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer that adapters may change."""

    # The layer's name in the model as transformers builds it.
    name: str
    inputs: int
    outputs: int


class Update(Protocol):
    """The factors of all loaded adapters for one layer."""

    def set(self, slot: int, factors: LowRank | None) -> None:
        """Sets the factors of an adapter; None if the adapter does not change the layer."""
        ...

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds each row's own update to y [..., outputs] in place, from x [..., inputs]."""
        ...


class TorchUpdate:
    """Updates by torch operators, on any device."""

    def __init__(self, site: Site, step: StepAdapters, slots: int) -> None:
        self._site = site
        self._step = step
        self._factors: list[LowRank | None] = [None] * slots

    def set(self, slot: int, factors: LowRank | None) -> None:
        """See `Update`."""
        self._factors[slot] = factors

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `Update`."""
        # y is written to, so it must not be a copy.
        x, y = x.reshape(-1, self._site.inputs), y.view(-1, self._site.outputs)
        for group in self._step.groups:
            factors = self._factors[group.slot]
            if factors is None:
                continue
            index = group.index(x.device)
            update = (x[index] @ factors.a.T * factors.scale) @ factors.b.T
            if isinstance(index, slice):
                y[index] += update
            else:
                y.index_add_(0, index, update)


class NativeUpdate:
    """Updates by the native kernel, which captured steps repeat."""

    def __init__(self, site: Site, step: StepAdapters, slots: int) -> None:
        self._site = site
        self._step = step
        self._table = FactorTable(slots)

    def set(self, slot: int, factors: LowRank | None) -> None:
        """See `Update`."""
        if factors is None:
            self._table.clear(slot)
        else:
            self._table.set(slot, factors.a, factors.b, factors.scale)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `Update`."""
        add_low_rank(x, y, self._step.struct, self._table.struct)

    def add_to_panels(self, x: torch.Tensor, panels: torch.Tensor) -> None:
        """Like `add`, where y is panels [rows, outputs / 32 rounded up, 32] with any strides
        between rows and between panels.
        """
        add_low_rank_to_panels(x, panels, self._step.struct, self._table.struct, self._site.outputs)
