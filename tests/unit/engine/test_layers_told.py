"""Whoever wants to send KV is told of each layer while the step runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from kvrelay.engine.native.batch import TOLD_FROM
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment

BLOCKS = [3, 1, 2, 0, 5]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_layer_is_told_of_once_its_kv_is_stored(
    tiny_model: Callable[[str], Path], architecture: str, kernels: Literal["auto", "torch"]
) -> None:
    """The first time, while the step is recorded, and when it runs as recorded."""
    runner = ModelRunner.load(
        str(tiny_model(architecture)),
        block_size=16,
        kv_bytes=1 << 20,
        max_model_len=128,
        kernels=kernels,
    )
    # Looked at without torch's knowledge
    layers = [(layer.k.numpy(), layer.v.numpy()) for layer in runner.kv.layers]
    prompt = [2 + i % 90 for i in range(TOLD_FROM + 5)]
    for time in range(4):
        runner.kv.buffer.zero_()
        told: list[int] = []

        def on_layer(index: int, told: list[int] = told) -> None:
            told.append(index)
            assert all(side[BLOCKS].any() for side in layers[index])
            assert not any(side.any() for layer in layers[index + 1 :] for side in layer)

        runner.run([Segment(prompt, 0, BLOCKS)], on_layer)
        assert told == list(range(len(layers))), time
    runner.run([Segment(prompt, 0, BLOCKS)])
    assert told == list(range(len(layers))), "nobody asked"
