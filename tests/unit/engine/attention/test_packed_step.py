"""A step's numbers on their way to a GPU."""

from __future__ import annotations

import pytest
import torch

from kvrelay.engine.attention.packed_step import PackedStep, batch_bucket
from kvrelay.engine.base.step_input import Part, Step


def test_all_numbers_are_in_one_buffer() -> None:
    step = Step([7, 8, 9, 3], [Part(0, 3, 6, [5, 9, 2, 4]), Part(3, 1, 1, [1])], [3, 2])
    packed = PackedStep.on_host(step, 4, pinned=False)
    assert packed.buffer.tolist() == [7, 8, 9, 3, 6, 7, 8, 1, 38, 39, 8, 5, 3, 2]
    copied = packed.on(torch.device("cpu"))
    assert (copied.slots.tolist(), copied.rows.tolist()) == ([38, 39, 8, 5], [3, 2])
    assert copied.token_ids.data_ptr() == copied.buffer.data_ptr()


def test_without_rows() -> None:
    packed = PackedStep.on_host(Step([7], [Part(0, 1, 6, [5, 9])], []), 4, pinned=False)
    assert packed.buffer.tolist() == [7, 6, 38]
    assert packed.rows.shape == (0,)


@pytest.mark.parametrize(
    ("count", "bucket"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (256, 256)],
)
def test_batch_bucket(count: int, bucket: int) -> None:
    assert batch_bucket(count) == bucket
