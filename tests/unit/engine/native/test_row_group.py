"""Groups of calls that take turns after some rows give what the calls give one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.native import row_group
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.ops import elementwise
from kvrelay.engine.native.program import BufferPool, Program, recorded

# Values of the memory in which all operands lie, so that many overlap.
SIZE = 4096


@dataclass(frozen=True)
class Place:
    """A tensor of [outer, rows, columns] in the memory."""

    offset: int
    strides: tuple[int, int, int]

    def of(self, memory: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        return memory.as_strided(shape, self.strides, self.offset)


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, int, int], *, broadcast: bool) -> Place:
    outer, rows, columns = shape
    strides = [(rows * columns, columns, 1), (columns, outer * columns, 1)]
    strides += [(2 * rows * columns, 2 * columns, 1), (1, outer, outer * rows)]
    if broadcast:
        strides += [(0, columns, 1), (0, 0, 1), (rows * columns, columns, 0)]
    chosen = draw(st.sampled_from(strides))
    reach = sum(step * (size - 1) for step, size in zip(chosen, shape, strict=True))
    # Few offsets, so that the same place is often met again.
    aligned = draw(st.sampled_from([0, columns // 2, 64, 512, 1024]))
    return Place(min(aligned, SIZE - reach - 1), chosen)


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[Operation, tuple[int, int, int], Place, Place, Place]]:
    shape = draw(st.sampled_from([(1, 37, 8), (3, 16, 8), (4, 4, 16), (1, 1, 40)]))
    calls = []
    for _ in range(draw(st.integers(2, 6))):
        operation = draw(st.sampled_from(Operation))
        # Half as many columns, as in a rotation of halves.
        narrow = (*shape[:2], shape[2] // 2) if draw(st.booleans()) else shape
        a, b = (draw(places(narrow, broadcast=True)) for _ in "ab")
        calls.append((operation, narrow, a, b, draw(places(narrow, broadcast=False))))
    return calls


@pytest.mark.usefixtures("kernels")
@settings(max_examples=200)
@given(chains(), st.integers(0, 10**6))
def test_a_program_gives_what_its_calls_give(
    calls: list[tuple[Operation, tuple[int, int, int], Place, Place, Place]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # A few rows.
        patch.setattr(row_group, "BLOCK_BYTES", 512)
        check(calls, seed)


def check(
    calls: list[tuple[Operation, tuple[int, int, int], Place, Place, Place]], seed: int
) -> None:
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    memory = start.clone()

    def run() -> None:
        for operation, shape, a, b, y in calls:
            binary = operation in (Operation.ADD, Operation.MULTIPLY)
            elementwise(
                operation,
                y.of(memory, shape),
                a.of(memory, shape),
                b.of(memory, shape) if binary else None,
            )

    program = Program(BufferPool())
    with recorded(program):
        run()
    wanted = memory.clone()
    memory.copy_(start)
    program.run()
    assert torch.equal(memory, wanted)
