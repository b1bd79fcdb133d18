"""Which rows of the running step have which adapter."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.base.step_input import Part
from kvrelay.engine.native import arguments as args


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of one adapter. `slot` is its place in the tables of factors."""

    slot: int
    rows: list[int]

    def index(self, device: torch.device) -> slice | torch.Tensor:
        """The rows as an index of a tensor: a slice if they are adjacent."""
        first, last = self.rows[0], self.rows[-1] + 1
        if last - first == len(self.rows):
            return slice(first, last)
        return torch.tensor(self.rows, dtype=torch.long, device=device)


class StepAdapters:
    """The adapters of the running step. The layers of one model read the same object, and `update`
    replaces its contents before each step.

    Captured kernel calls keep the address of `struct`.
    """

    def __init__(self) -> None:
        self.groups: tuple[AdapterGroup, ...] = ()
        self.struct = args.AdapterRows()
        self._held: tuple[object, ...] = ()

    @property
    def active(self) -> bool:
        """Whether any row of the step has an adapter."""
        return bool(self.groups)

    def update(self, parts: Sequence[Part]) -> bool:
        """Takes the next step's parts. Returns whether any row has an adapter."""
        if not any(part.adapter is not None for part in parts):
            self.groups = ()
            return False
        rows: dict[int, list[int]] = {}
        for part in parts:
            if part.adapter is not None:
                rows.setdefault(part.adapter, []).extend(range(part.row, part.row + part.new))
        self.groups = tuple(AdapterGroup(slot, found) for slot, found in rows.items())
        self._describe()
        return True

    def _describe(self) -> None:
        groups, rows = array("q"), array("q")
        for group in self.groups:
            groups.extend((len(rows), len(group.rows), group.slot))
            rows.extend(group.rows)
        self._held = (groups, rows)
        self.struct.num_groups = len(self.groups)
        self.struct.groups = _pointer(groups, args.AdapterGroup)
        self.struct.rows = _pointer(rows, ctypes.c_int64)


def _pointer(values: array[int], kind: type) -> object:
    return ctypes.cast(values.buffer_info()[0], ctypes.POINTER(kind))
