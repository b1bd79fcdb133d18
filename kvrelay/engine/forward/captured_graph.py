"""A captured graph on a CPU: a forward pass over a fixed number of tokens that is recorded once,
then runs without the model's Python code.

It does what CUDA graphs do on a GPU: shapes are fixed, memory stays in place, and a run is a list
of kernel calls. Operators that the native kernels support are lowered to them. The others are
called through torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvrelay.engine.forward.capturable import NoValues, refuse_values
from kvrelay.engine.native import ops
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.program import BufferPool, Program, empty, recorded

aten = torch.ops.aten


class CapturedForward:
    """The captured graph of `forward`, which reads inputs of fixed shapes. The caller writes the
    inputs in place before each run.
    """

    def __init__(self, forward: Callable[[], torch.Tensor], pool: BufferPool) -> None:
        self._program = Program(pool)
        with recorded(self._program), NoValues(), _Recorder(self._program):
            output = forward()
        self.output = pool.uncounted(output)

    def run(self) -> torch.Tensor:
        """Runs the captured graph. The output lies in the pool's memory: use it before the next run
        of any program.
        """
        self._program.run()
        return self.output


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator, decomposed, and adds the parts to the program."""

    def __init__(self, program: Program) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._program = program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            composed = func.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
        refuse_values(func, args)
        if func._schema.is_mutable:
            self._program.forget()
        lowering = LOWERINGS.get(func)
        if lowering is not None and (lowered := lowering(*args, **kwargs)) is not None:
            return lowered
        result = func(*args, **kwargs)
        if _is_view(func, args, kwargs, _outputs(result)):
            return result
        pool = self._program.pool
        kept = result if func._schema.is_mutable else tree_map_only(torch.Tensor, pool.copy, result)
        if func.overloadpacket not in ALLOCATIONS:
            uncounted = tree_map_only(torch.Tensor, pool.uncounted, (args, kwargs, _outputs(kept)))
            self._program.add_torch(_again(func, *uncounted))
        return kept


ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}


def _is_view(func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> bool:
    """True if each output is a view of an input's memory."""
    if func._schema.is_mutable:
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return all(
        isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() in storages
        for output in outputs
    )


def _outputs(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _again(func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> Callable[[], None]:
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)

    def run() -> None:
        for kept, new in zip(outputs, _outputs(func(*args, **kwargs)), strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(new)

    return run


# A lowering maps an operator's arguments to its result by a kernel, or to None if no kernel
# supports them.


def _suits(*tensors: Any) -> bool:
    return all(
        isinstance(x, torch.Tensor) and x.dtype in ops.FLOATS and 0 < x.dim() <= 4 for x in tensors
    )


def _binary(operation: Operation) -> Callable[..., torch.Tensor | None]:
    def lower(a: Any, b: Any, *, alpha: float = 1) -> torch.Tensor | None:
        if not _suits(a, b) or alpha != 1:
            return None
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))  # type: ignore[no-untyped-call]
        return ops.elementwise(operation, empty(shape, torch.promote_types(a.dtype, b.dtype)), a, b)

    return lower


def _unary(operation: Operation) -> Callable[..., torch.Tensor | None]:
    def lower(a: Any) -> torch.Tensor | None:
        return ops.elementwise(operation, empty(tuple(a.shape), a.dtype), a) if _suits(a) else None

    return lower


def _clone(a: Any, *, memory_format: Any = None) -> torch.Tensor | None:
    if not _suits(a) or memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    return ops.elementwise(Operation.COPY, empty(tuple(a.shape), a.dtype), a)


def _cast(a: Any, *, dtype: Any = None, **other: Any) -> torch.Tensor | None:
    if not _suits(a) or dtype not in ops.FLOATS or any(value for value in other.values()):
        return None
    return ops.elementwise(Operation.COPY, empty(tuple(a.shape), dtype), a)


def _cat(tensors: Any, dim: int = 0) -> torch.Tensor | None:
    if not _suits(*tensors) or len({x.dtype for x in tensors}) > 1:
        return None
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    y = empty(tuple(shape), tensors[0].dtype)
    start = 0
    for x in tensors:
        ops.elementwise(Operation.COPY, y.narrow(dim, start, x.shape[dim]), x)
        start += x.shape[dim]
    return y


LOWERINGS: dict[Any, Callable[..., torch.Tensor | None]] = {
    aten.add.Tensor: _binary(Operation.ADD),
    aten.mul.Tensor: _binary(Operation.MULTIPLY),
    aten.neg.default: _unary(Operation.NEGATE),
    aten.silu.default: _unary(Operation.SILU),
    aten.clone.default: _clone,
    aten._to_copy.default: _cast,
    aten.cat.default: _cat,
}
