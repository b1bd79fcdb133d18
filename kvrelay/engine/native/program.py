"""A list of kernel calls that is made once and then run as often as one likes, outside of Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvrelay.engine.native.arguments import Step
from kvrelay.engine.native.build import library


class BufferPool:
    """Memory for what a step computes on the way. A buffer is given out again once no tensor refers to it.

    Calls that were recorded hold addresses, not tensors: they stay right as long as the pool lives, since a later run
    goes through the same calls in the same order.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        needed = max(64, count * dtype.itemsize)
        free = [buffer for buffer in self._buffers if buffer.nbytes >= needed and _unused(buffer)]
        if free:
            buffer = min(free, key=lambda found: found.nbytes)
        else:
            buffer = torch.empty(needed, dtype=torch.uint8)
            self._buffers.append(buffer)
        return buffer[: count * dtype.itemsize].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)


def _unused(buffer: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= 2  # the tensor, and the storage asked for


class Program:
    """What was computed while it was recorded: runs of kernel calls, and calls of torch in between."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self._parts: list[Callable[[], Any]] = []
        self._open: list[tuple[Any, ctypes.Structure]] = []  # kernel calls since the last call of torch

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
            *(Step(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(call)) for kernel, call in self._open)
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


def call(kernel: str, arguments: ctypes.Structure) -> None:
    """Runs a kernel, and adds it to the program that is recorded."""
    function = getattr(library(), kernel)
    function(ctypes.byref(arguments))
    if _recording.program is not None:
        _recording.program.add_kernel(function, arguments)
