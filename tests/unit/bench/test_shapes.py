from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import build

from kvrelay.bench.cost import model_cost, shape_cost
from kvrelay.bench.shapes import NAMED, random_model, shape_config
from kvrelay.engine.attention import paged_attention
from kvrelay.engine.model.loader import loaded_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import InvalidArgument


def test_llama_8b_has_eight_billion_parameters() -> None:
    cost = shape_cost("llama-3.1-8b")
    table = 128256 * 4096
    assert (cost.layers, cost.heads, cost.kv_heads, cost.head_dim) == (32, 32, 8, 128)
    assert cost.head == table
    assert cost.body == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    assert 8.0e9 < cost.body + cost.head + table < 8.1e9
    assert cost.kv_token_bytes() == 131072


@pytest.mark.parametrize("tied", [False, True])
def test_a_shape_costs_what_its_checkpoint_costs(tied: bool, tmp_path: Path) -> None:
    folder = build("llama", tmp_path, tie_word_embeddings=tied)
    shape, checkpoint = shape_cost(str(folder)), model_cost(str(folder))
    assert (shape.body, shape.head, shape.vocab_size) == (
        checkpoint.body,
        checkpoint.head,
        checkpoint.vocab_size,
    )


def test_weights_are_made_where_they_run(tiny_model: Callable[..., Path]) -> None:
    folder = str(tiny_model())
    assert {one.device.type for one in random_model(folder, "meta").parameters()} == {"meta"}
    state = torch.random.get_rng_state()
    models = [
        random_model(folder, "cpu", attn_implementation=paged_attention.NAME) for _ in range(2)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
    runner = ModelRunner.of(loaded_model(models[0], "tiny", "tiny"), kv_bytes=1 << 20)
    logits = runner.forward([Segment([1, 2, 3], 0, [0])], [2])
    assert bool(logits.isfinite().all())
    assert logits.std() > 0


@pytest.mark.parametrize("shape", ["llama-9", "/no/such/folder"])
def test_an_unknown_shape_is_told(shape: str) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"allowed are m200, llama-3\.1-8b and a folder with a config\.json",
    ):
        shape_config(shape)


def test_a_broken_configuration_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="transformers cannot read it"):
        shape_config(str(tmp_path))


def test_m200_is_named() -> None:
    assert "m200" in NAMED
