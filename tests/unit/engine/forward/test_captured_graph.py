"""Recording: what a run gives on other values, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kvrelay.engine.forward.capturable import NotCapturable
from kvrelay.engine.forward.captured_graph import CapturedForward
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.ops import PackedWeight, elementwise, linear
from kvrelay.engine.native.program import BufferPool, empty

Function = Callable[[torch.Tensor], torch.Tensor]


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = PackedWeight.of(values(9, 6, 6))
INT8 = PackedWeight.of(values(8, 4, 4), int8=True)


def int8_around(change: Function) -> Function:
    """A sum of products with int8 weights of a tensor before and after a change."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x[:, :4].clone()
        before = linear(x, INT8, None)
        return before + linear(change(x), INT8, None) + linear(x, INT8, None)

    return function


RECORDED: dict[str, Function] = {
    "nothing": lambda x: x,
    "a view": lambda x: x.T[1:],
    "a sum": lambda x: x + x[0],
    "a sum with a factor": lambda x: torch.add(x, x[0], alpha=3),
    "a product of types": lambda x: x.bfloat16() * x,
    "numbers": lambda x: x * 2.5 + 1 - x / 3,
    "a cast and back": lambda x: x.to(torch.bfloat16).float(),
    "an integer cast": lambda x: (x * 8).to(torch.int32).float(),
    "the second half first": lambda x: torch.cat((-x[:, 3:], x[:, :3]), -1),
    "a stack": lambda x: torch.stack((x, x * 2)).flatten(),
    "a linear": lambda x: linear(x, WEIGHT, None),
    "a linear of a transposed view": lambda x: linear(x.T.reshape(4, 6), WEIGHT, None),
    "the same in int8": int8_around(lambda x: x),
    "a change of int8's rows": int8_around(lambda x: x.mul_(-3)),
    "a change of a part of int8's rows": int8_around(lambda x: (x[1:2].neg_(), x)[1]),
    "a copy of int8's rows": int8_around(lambda x: x * 2),
    "torch in between": lambda x: linear(torch.tanh(linear(x, WEIGHT, None)), WEIGHT, None),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "into a part": lambda x: torch.zeros(5, 6).index_copy_(0, torch.tensor([3, 0, 1, 2]), x),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "a mask that keeps the shape": lambda x: x.masked_fill(x > 0, 7.0),
    "several results": lambda x: (
        torch.cat([one * 2 for one in x.split([2, 4], 1)], 1) + x.max(1).values[:, None]
    ),
    "picked by number": lambda x: x[x.argmax(0)],
    "sorted": lambda x: x.sort(0).values,
    "one hot": lambda x: nn.functional.one_hot(x.argmax(1), 6).float(),
    "an assertion of shapes": lambda x: (torch._assert_async(x.sum() < 1e9), x * 2)[1],
    "a constant": lambda x: x + torch.arange(6) * torch.tensor(2.0),
    "nothing at all of it": lambda x: x[:0] * 2,
}


@pytest.mark.parametrize("function", RECORDED.values(), ids=RECORDED)
def test_a_run_gives_what_the_function_gives(function: Function) -> None:
    x = values(0, 4, 6)
    with torch.inference_mode():
        captured = CapturedForward(lambda: function(x), BufferPool())
        for seed in range(3):
            x.copy_(values(seed, 4, 6))
            wanted = function(x.clone())
            assert torch.equal(captured.run(), wanted)
            assert captured.output.dtype == wanted.dtype


LOOKING: dict[str, Function] = {
    "item": lambda x: x * x.sum().item(),
    "if": lambda x: x * 2 if (x > 1).any() else x,
    "int": lambda x: x * int(x.sum()),
    "range": lambda x: x * len(range(x.abs().sum().long())),  # type: ignore[call-overload]
    "a list": lambda x: x * x.sum().tolist(),
    "an array": lambda x: x * float(x.numpy().sum()),
    "an array of its own": lambda x: x * float(np.asarray(x).sum()),
    "equal": lambda x: x * torch.equal(x, -x),
    "in": lambda x: x * (7 in x),
    "a mask": lambda x: x[x > 0],
    "rows picked by a mask": lambda x: x.index_select(0, (x[:, 0] > 0).nonzero()[:, 0]),
    "where it is": lambda x: torch.where(x > 0)[0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeated": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
    "unique": lambda x: x.unique(),
    "an index": lambda x: x[x.argmax() % 4],
}


@pytest.mark.parametrize("function", LOOKING.values(), ids=LOOKING)
def test_what_depends_on_values_is_refused(function: Function) -> None:
    x = values(0, 4, 6)
    with torch.inference_mode(), pytest.raises(NotCapturable, match="depends on values"):
        CapturedForward(lambda: function(x), BufferPool())
    assert empty((2,), torch.float32).untyped_storage().nbytes() == 8, "recording has ended"


def test_buffers_are_given_out_again_when_nobody_refers_to_them() -> None:
    pool = BufferPool()
    first, second = pool.empty((8, 8), torch.float32), pool.empty((8, 8), torch.float32)
    view = first[1:3].T
    address = first.data_ptr()
    assert second.data_ptr() != address
    del first
    assert pool.empty((8, 8), torch.float32).data_ptr() != address, "a view of it is left"
    del view
    assert pool.empty((3, 5), torch.bfloat16).data_ptr() == address
    assert pool.nbytes == 3 * 256


def test_a_long_chain_needs_few_buffers_also_of_several_programs() -> None:
    pool = BufferPool()
    x = values(0, 64, 64)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = torch.tanh(y + x)  # a kernel, and a call of torch
        return y

    with torch.inference_mode():
        first, second = CapturedForward(chain, pool), CapturedForward(chain, pool)
        assert pool.nbytes == 3 * x.nbytes
        x.copy_(values(1, 64, 64))
        wanted = chain()
        assert torch.equal(first.run(), wanted)
        assert torch.equal(second.run(), wanted)


def test_another_thread_is_not_recorded() -> None:
    """Two workers in a process have an engine thread each."""
    x, theirs = values(0, 4, 6), values(1, 4, 6)
    found: list[torch.Tensor] = []

    def other() -> None:
        found.append(elementwise(Operation.ADD, empty((4, 6), torch.float32), theirs, theirs))

    def function() -> torch.Tensor:
        y = x + x
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return y

    pool = BufferPool()
    captured = CapturedForward(function, pool)
    before = found[0].clone()
    theirs.zero_()
    x.copy_(values(2, 4, 6))
    assert torch.equal(captured.run(), x + x)
    assert torch.equal(found[0], before)
    assert pool.nbytes == 128


def test_strides_that_the_kernels_results_do_not_have() -> None:
    """Sums of transposed views are transposed in torch, and not here: an error, which leaves
    nothing recorded.
    """
    x = values(0, 4, 6)

    def function() -> Any:
        return (x.T + x.T).T.view(24)

    with torch.inference_mode(), pytest.raises(RuntimeError, match="view size is not compatible"):
        CapturedForward(function, BufferPool())
    assert empty((2,), torch.float32).untyped_storage().nbytes() == 8
