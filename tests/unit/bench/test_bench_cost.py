from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import build

from kvrelay.bench.cost import ModelCost, Work, model_cost
from kvrelay.bench.limits import Limits
from kvrelay.errors import InvalidArgument, ModelRefused

# tests/support/tiny_models.py: 2 layers, hidden 48, 4 heads and 2 KV heads of 12, intermediate 64,
# vocabulary 128.
LAYER = 48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 64
HEAD = 128 * 48

SMALL = ModelCost(
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    body=1000,
    head=100,
    max_model_len=64,
    vocab_size=10,
    dtype="bfloat16",
)


def test_matrices_are_counted_from_the_checkpoint(tiny_model: Callable[..., Path]) -> None:
    cost = model_cost(str(tiny_model()))
    assert (cost.body, cost.head) == (2 * LAYER, HEAD)
    assert (cost.layers, cost.heads, cost.kv_heads, cost.head_dim, cost.vocab_size) == (
        2,
        4,
        2,
        12,
        128,
    )
    assert cost.dtype == "float32"
    assert cost.max_model_len == 192


def test_a_tied_head_is_the_table_of_embeddings(tmp_path: Path) -> None:
    cost = model_cost(str(build("llama", tmp_path, tie_word_embeddings=True)))
    assert (cost.body, cost.head) == (2 * LAYER, HEAD)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "opt"])
def test_other_names_for_the_same_things(
    tiny_model: Callable[..., Path], architecture: str
) -> None:
    cost = model_cost(str(tiny_model(architecture)))
    assert cost.head == HEAD
    assert cost.heads * cost.head_dim == 48
    assert cost.body % 2 == 0
    assert cost.body >= LAYER


def test_a_model_of_experts_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgument, match="experts"):
        model_cost(str(tiny_model("mixtral")))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused):
        model_cost(str(tmp_path))


def test_kv_and_weights_by_hand() -> None:
    assert SMALL.kv_token_bytes() == 2 * 2 * 2 * 8 * 2
    assert SMALL.weight_bytes("bfloat16") == 2200
    assert SMALL.weight_bytes("int8") == 1100


def test_prefill_by_hand() -> None:
    """Ten tokens: body for each, head for the last, and the triangle of attention."""
    work = SMALL.prefill(10, chunk_tokens=10, weights="bfloat16")
    assert work.flops == 2 * 1000 * 10 + 2 * 100 + 4 * 2 * 4 * 8 * 10 * 10 / 2
    assert work.bytes == 2200


def test_each_chunk_reads_the_weights_and_the_kv_before_it() -> None:
    work = SMALL.prefill(10, chunk_tokens=4, weights="int8")
    assert work.bytes == 3 * 1100 + (0 + 4 + 8) * 128


def test_decode_by_hand() -> None:
    """Three sequences share one reading of the weights."""
    work = SMALL.decode(3, 20, "bfloat16")
    assert work.flops == 3 * (2 * 1100 + 4 * 2 * 4 * 8 * 20)
    assert work.bytes == 2200 + 3 * 20 * 128


def test_seconds_are_work_by_rate() -> None:
    limits = Limits(1, {"float32": 10.0, "bfloat16": 40.0}, bandwidth=5.0)
    assert Work(flops=80, bytes=20).compute_seconds(limits, "bfloat16") == 2
    assert Work(flops=80, bytes=20).memory_seconds(limits) == 4
