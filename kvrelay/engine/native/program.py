"""A list of kernel calls that is made once and then run as often as one likes, outside of
Python.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.native.arguments import Step
from kvrelay.engine.native.build import library

ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The same bytes as two tensors; how often the storage of `counted` is referred to tells
    whether it is in use.
    """

    memory: torch.Tensor
    counted: torch.Tensor

    @classmethod
    def of(cls, size: int) -> _Buffer:
        # Torch's own would be recorded
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(
            torch.frombuffer(memory, dtype=torch.uint8), torch.frombuffer(memory, dtype=torch.uint8)
        )

    @property
    def in_use(self) -> bool:
        count: int = torch._C._storage_Use_Count(self.counted.untyped_storage()._cdata)
        return count > 2  # the tensor, and the storage asked for


class BufferPool:
    """Memory for what a step computes on the way. A buffer is given out again once no tensor refers
    to it.

    Calls that were recorded hold addresses, or tensors that do not count: they stay right as long
    as the pool lives, since a later run goes through the same calls in the same order.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}  # by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        needed = max(1, math.ceil(count * dtype.itemsize / ALIGNMENT)) * ALIGNMENT
        free = [
            buffer
            for buffer in self._buffers.values()
            if len(buffer.memory) >= needed and not buffer.in_use
        ]
        if free:
            buffer = min(free, key=lambda found: len(found.memory))
        else:
            buffer = _Buffer.of(needed)
            self._buffers[buffer.memory.data_ptr()] = buffer
        return buffer.counted[: count * dtype.itemsize].view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory of the pool, with the same strides."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        kept = self.empty((reach + 1 if tensor.numel() else 0,), tensor.dtype)
        return kept.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def uncounted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor as one that does not keep its buffer in use; those from elsewhere as they
        are.
        """
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor
        memory = buffer.memory.view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @property
    def nbytes(self) -> int:
        return sum(len(buffer.memory) for buffer in self._buffers.values())


class Program:
    """What was computed while it was recorded: runs of kernel calls, and calls of torch in
    between.
    """

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self._parts: list[Callable[[], Any]] = []
        # Kernel calls since the last call of torch
        self._open: list[tuple[Any, ctypes.Structure]] = []

    def add_kernel(self, kernel: Any, call: ctypes.Structure) -> None:
        self._open.append((kernel, call))

    def add_torch(self, call: Callable[[], Any]) -> None:
        self._close()
        self._parts.append(call)

    def finish(self) -> None:
        self._close()

    def run(self) -> None:
        for part in self._parts:
            part()

    def _close(self) -> None:
        if not self._open:
            return
        steps = (Step * len(self._open))(
            *(
                Step(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(call))
                for kernel, call in self._open
            )
        )
        calls = [call for _, call in self._open]
        run = library().kvrelay_run
        count = ctypes.c_int64(len(steps))

        def run_kernels(_keep: Any = calls) -> None:
            run(steps, count)

        self._parts.append(run_kernels)
        self._open = []


class _Recording(threading.local):
    program: Program | None = None  # that this thread records


_recording = _Recording()


@contextmanager
def recorded(program: Program) -> Iterator[None]:
    assert _recording.program is None, "one program at a time"
    _recording.program = program
    try:
        yield
    finally:
        _recording.program = None
    program.finish()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    program = _recording.program
    return torch.empty(shape, dtype=dtype) if program is None else program.pool.empty(shape, dtype)


def aside(function: Callable[[], None]) -> None:
    """Calls something that is no kernel, and adds it to the program that is recorded."""
    if _recording.program is not None:
        _recording.program.add_torch(function)
    function()


def call(kernel: str, arguments: ctypes.Structure) -> None:
    """Runs a kernel, and adds it to the program that is recorded."""
    function = getattr(library(), kernel)
    function(ctypes.byref(arguments))
    if _recording.program is not None:
        _recording.program.add_kernel(function, arguments)
