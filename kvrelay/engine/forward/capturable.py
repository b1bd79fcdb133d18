"""Checks whether a forward pass does the same for all values, so that a captured run can be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class NotCapturable(Exception):
    """The model reads tensor values while it runs, or an operation cannot be captured."""


@contextmanager
def values_unseen() -> Iterator[None]:
    """A context in which reading a tensor's values raises NotCapturable."""
    with NoValues(), _NoValueOperators():  # type: ignore[no-untyped-call]
        yield


class NoValues(TorchFunctionMode):
    """Raises NotCapturable for functions that read a tensor's memory without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise NotCapturable(f"{func.__name__} depends on values")
        return func(*args, **kwargs or {})


class _NoValueOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator, decomposed, and raises NotCapturable if it depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            composed = func.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
        refuse_values(func, args)
        # To count the true elements of a mask, the host would have to wait.
        if func in _PUTS and args[2].numel() > 1 and _has_mask(args[1]):
            raise NotCapturable(f"{func} depends on values")
        return func(*args, **kwargs)


_PUTS = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


def refuse_values(func: Any, args: Any) -> None:
    """Raises NotCapturable for an operator whose result's shape, or whose result on the host,
    depends on values.
    """
    # Indexing by a mask depends on values; indexing by numbers does not.
    if func is aten.index.Tensor:
        depends = _has_mask(args[1])
    else:
        depends = bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        )
    if depends:
        raise NotCapturable(f"{func} depends on values")


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
