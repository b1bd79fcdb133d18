"""A list of kernel calls that is recorded once and then runs any number of times without Python
between the calls.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from kvrelay.engine.native.arguments import Step
from kvrelay.engine.native.build import library
from kvrelay.engine.native.row_group import RowCall, RowGroup, Rows

ALIGNMENT = 64  # bytes

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The same bytes as two tensors. The reference count of the storage of `counted` tells whether
    the buffer is in use.
    """

    size: int  # bytes
    memory: torch.Tensor
    counted: torch.Tensor

    @classmethod
    def of(cls, size: int) -> _Buffer:
        # torch's own allocation would be recorded.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(
            size,
            torch.frombuffer(memory, dtype=torch.uint8),
            torch.frombuffer(memory, dtype=torch.uint8),
        )

    @property
    def in_use(self) -> bool:
        count: int = torch._C._storage_Use_Count(self.counted.untyped_storage()._cdata)
        # Two references are the tensor and the storage object of this call.
        return count > 2


class BufferPool:
    """Memory for intermediate results of a step. A buffer is reused once no tensor refers to it.

    Recorded calls hold addresses, or tensors that are not counted. They stay valid as long as the
    pool exists, since a later run makes the same calls in the same order.
    """

    def __init__(self) -> None:
        # By address.
        self._buffers: dict[int, _Buffer] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in the smallest unused buffer that holds it, or in a
        new buffer.
        """
        count = math.prod(shape)
        needed = max(1, math.ceil(count * dtype.itemsize / ALIGNMENT)) * ALIGNMENT
        free = [
            buffer
            for buffer in self._buffers.values()
            if buffer.size >= needed and not buffer.in_use
        ]
        if free:
            buffer = min(free, key=lambda found: found.size)
        else:
            buffer = _Buffer.of(needed)
            self._buffers[buffer.memory.data_ptr()] = buffer
        return buffer.counted[: count * dtype.itemsize].view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the pool's memory, with the same strides."""
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        kept = self.empty((reach + 1 if tensor.numel() else 0,), tensor.dtype)
        return kept.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def uncounted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor without a count on its buffer. A tensor from outside the pool is returned
        unchanged.
        """
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor
        memory = buffer.memory.view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.size for buffer in self._buffers.values())


class Program:
    """A recorded computation: runs of kernel calls, separated by torch calls."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self._parts: list[Callable[[], Any]] = []
        # The argument and the result of the last `once`. A kept tensor keeps its memory.
        self._once: tuple[torch.Tensor, Any] | None = None
        # Kernel calls since the last torch call.
        self._open: list[tuple[Any, ctypes.Structure] | RowGroup] = []

    def add_kernel(self, kernel: Any, call: ctypes.Structure) -> None:
        """Appends a kernel call. The program keeps `call` alive."""
        self._open.append((kernel, call))

    def add_rows(self, call: RowCall) -> None:
        """Appends a call that computes row by row, to the last group if possible."""
        group = self._open[-1] if self._open else None
        if not isinstance(group, RowGroup) or not group.takes(call):
            group = RowGroup()
            self._open.append(group)
        group.calls.append(call)

    def add_torch(self, call: Callable[[], Any]) -> None:
        """Appends a torch call."""
        self._close()
        self._parts.append(call)

    def once(self, compute: Callable[[torch.Tensor], Result], x: torch.Tensor) -> Result:
        """compute(x), or the result of the last call if that was the same."""
        if self._once is None or not _same_memory(self._once[0], x):
            self._once = x, compute(x)
        result: Result = self._once[1]
        return result

    def forget(self) -> None:
        """Tells that the values of a tensor change, so that `once` computes again."""
        self._once = None

    def finish(self) -> None:
        """Ends the recording. Call it before `run`."""
        self.forget()
        self._close()

    def run(self) -> None:
        """Runs all recorded calls in order."""
        for part in self._parts:
            part()

    def _close(self) -> None:
        if not self._open:
            return
        calls = [
            (library().kvrelay_run_rows, one.arguments()) if isinstance(one, RowGroup) else one
            for one in self._open
        ]
        steps = (Step * len(calls))(
            *(
                Step(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(call))
                for kernel, call in calls
            )
        )
        run = library().kvrelay_run
        count = ctypes.c_int64(len(steps))

        def run_kernels(_keep: Any = (calls, self._open)) -> None:
            run(steps, count)

        self._parts.append(run_kernels)
        self._open = []


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
    )


class _Recording(threading.local):
    # The program that this thread records.
    program: Program | None = None


_recording = _Recording()


@contextmanager
def recorded(program: Program) -> Iterator[None]:
    """Records the kernel calls of this thread into `program` until the context ends. Recordings do
    not nest.
    """
    assert _recording.program is None, "one program at a time"
    _recording.program = program
    try:
        yield
    finally:
        _recording.program = None
    program.finish()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, from the recorded program's pool during a recording."""
    program = _recording.program
    return torch.empty(shape, dtype=dtype) if program is None else program.pool.empty(shape, dtype)


def once(compute: Callable[[torch.Tensor], Result], x: torch.Tensor) -> Result:
    """compute(x). During a recording, a second call in a row gives the first result."""
    program = _recording.program
    return compute(x) if program is None else program.once(compute, x)


def aside(function: Callable[..., None], *tensors: torch.Tensor) -> None:
    """Calls a function that is no kernel with the tensors, and adds the call to the program during
    a recording. Their memory is valid during the call.
    """
    program = _recording.program
    if program is not None:
        program.add_torch(partial(function, *map(program.pool.uncounted, tensors)))
    function(*tensors)


def call(kernel: str, arguments: ctypes.Structure) -> None:
    """Runs a kernel, and adds it to the program during a recording."""
    function = getattr(library(), kernel)
    function(ctypes.byref(arguments))
    if _recording.program is not None:
        _recording.program.add_kernel(function, arguments)


def call_rows(
    kernel: str,
    arguments: ctypes.Structure,
    *,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
) -> None:
    """Runs a kernel that computes each row of `writes` from the same row of `reads`, and adds it to
    the program during a recording. A row is the last dimension; all have the same number of rows.
    """
    rows = math.prod(writes[0].shape[:-1])
    if not writes[0].numel():
        return
    made = RowCall(
        getattr(library(), kernel),
        arguments,
        rows,
        [Rows.of(tensor) for tensor in reads],
        [Rows.of(tensor) for tensor in writes],
    )
    library().kvrelay_run_rows(ctypes.byref(RowGroup([made]).arguments()))
    if _recording.program is not None:
        _recording.program.add_rows(made)
