"""Kernel calls that compute row by row, and groups of them that take turns after some rows.

A tensor of a long prompt is larger than the second-level cache. If each kernel ran over all rows,
the next kernel would read its input from memory. In a group, it reads from the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvrelay.engine.native.arguments import RowsCall, RowStep

# Bytes that a group reads and writes before its next rows. Smaller than the second-level cache.
BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Addresses of a tensor's rows. A row is the last dimension."""

    start: int
    end: int
    # End of the first row.
    row_end: int
    # (bytes to the next row, rows) of the other dimensions, without those of size 1.
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        """The rows of a tensor that is not empty."""
        *outer, last = zip(tensor.stride(), tensor.shape, strict=True)
        size = tensor.element_size()
        steps = tuple((stride * size, count) for stride, count in outer if count > 1)
        start = tensor.data_ptr()
        row_end = start + (last[0] * (last[1] - 1) + 1) * size
        end = row_end + sum(step * (count - 1) for step, count in steps)
        return cls(start, end, row_end, steps)

    def independent(self, other: Rows) -> bool:
        """True if no row shares memory with another row of `other`. The same row may."""
        if self.end <= other.start or other.end <= self.start:
            return True
        if self.steps != other.steps:
            return False
        reach = max(self.row_end, other.row_end) - min(self.start, other.start)
        for step, count in sorted(self.steps):
            if step < reach:
                return False
            reach += step * (count - 1)
        return True


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call of a kernel that computes each row from the same row of its inputs."""

    kernel: Any
    arguments: ctypes.Structure
    rows: int
    reads: Sequence[Rows]
    writes: Sequence[Rows]

    def independent(self, later: RowCall) -> bool:
        """True if a later call may process some rows before this call has processed all rows."""
        return (
            self.rows == later.rows
            and all(
                mine.independent(its)
                for mine in self.writes
                for its in (*later.reads, *later.writes)
            )
            and all(mine.independent(its) for mine in self.reads for its in later.writes)
        )

    @property
    def row_bytes(self) -> int:
        """Bytes that a row reads and writes."""
        return sum(rows.row_end - rows.start for rows in (*self.reads, *self.writes))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Calls in order, each independent of the earlier ones."""

    calls: list[RowCall] = field(default_factory=list)

    def takes(self, call: RowCall) -> bool:
        """True if the call can be added."""
        return all(earlier.independent(call) for earlier in self.calls)

    def arguments(self) -> RowsCall:
        """Arguments of `kvrelay_run_rows`, valid as long as the group."""
        steps = (RowStep * len(self.calls))(
            *(
                RowStep(ctypes.cast(call.kernel, ctypes.c_void_p), ctypes.addressof(call.arguments))
                for call in self.calls
            )
        )
        return RowsCall(
            steps=steps,
            count=len(self.calls),
            rows=self.calls[0].rows,
            block=max(1, BLOCK_BYTES // sum(call.row_bytes for call in self.calls)),
        )
