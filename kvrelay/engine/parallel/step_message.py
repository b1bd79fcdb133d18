"""Steps as numbers: the message from rank 0 that tells the other ranks what to compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvrelay.engine.base.step_input import Part, Step

Numbers = npt.NDArray[np.int64]

_PART_NUMBERS = 4


def step_to_numbers(step: Step) -> Numbers:
    """1-D int64: the counts of tokens, parts and rows; then these; then the parts' blocks.
    `on_layer` is left out.
    """
    parts = [(part.row, part.new, part.past, len(part.blocks)) for part in step.parts]
    return np.fromiter(
        chain(
            (len(step.token_ids), len(step.parts), len(step.rows)),
            step.token_ids,
            chain.from_iterable(parts),
            step.rows,
            chain.from_iterable(part.blocks for part in step.parts),
        ),
        dtype=np.int64,
    )


def step_from_numbers(numbers: Numbers) -> Step:
    """The inverse of `step_to_numbers`."""
    every: list[int] = numbers.tolist()
    taken = 0

    def take(count: int) -> Sequence[int]:
        nonlocal taken
        taken += count
        return every[taken - count : taken]

    num_tokens, num_parts, num_rows = take(3)
    token_ids = take(num_tokens)
    shapes = [take(_PART_NUMBERS) for _ in range(num_parts)]
    rows = take(num_rows)
    parts = [Part(row, new, past, take(num_blocks)) for row, new, past, num_blocks in shapes]
    return Step(token_ids, parts, rows)
