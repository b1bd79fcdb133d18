"""The figures of published models, beside those that their authors publish."""

from __future__ import annotations

import pytest

from kvrelay.models.model_shape import model_shape
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.model_memory import matrix_parameters
from kvrelay.planning.model_table import PublishedModel, find_model, model_names
from kvrelay.planning.sizing.capacity import free_bytes, longest_context

# KiB per token in bf16: 2 x layers x KV heads x head dim x 2 B of each config.json. DeepSeek-V3: 61
# x (512 + 64) x 2 B, the 70 KB of "Insights into DeepSeek-V3" (2025), table 1, which also has 516
# KB for Llama-3.1-405B.
PUBLISHED_KIB = {
    "qwen2.5-0.5b": 12,
    "qwen3-0.6b": 112,
    "mistral-7b-v0.3": 128,
    "qwen2.5-7b": 56,
    "llama-3.1-8b": 128,
    "qwen3-8b": 144,
    "qwen3-32b": 256,
    "llama-3.1-70b": 320,
    "gemma-2-9b": 336,
    "phi-4": 200,
    "qwen3-30b-a3b": 96,
    "gpt-oss-20b": 48,
    "llama-2-7b": 512,
    "falcon-7b": 8,
    "llama-3.1-405b": 504,
    "qwen3-next-80b-a3b": 24,
}
# Published counts that leave the embeddings out.
_WITHOUT_EMBEDDINGS = {"gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"}
_WITHOUT_EMBEDDINGS |= {"deepseek-r1", "glm-4.5", "glm-4.5-air"}


def published(name: str) -> PublishedModel:
    found = find_model(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", PUBLISHED_KIB)
def test_kv_of_a_token_is_exactly_the_published_size(name: str) -> None:
    shape = model_shape(published(name).config)
    assert KvSize(shape, "bf16", "native").bytes_per_token == PUBLISHED_KIB[name] * 1024


def test_latent_kv_is_exactly_the_published_size() -> None:
    shape = model_shape(published("deepseek-v3").config)
    assert KvSize(shape, "bf16", "compact").bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    # The value of a token is in its key.
    native = KvSize(shape, "bf16", "native")
    assert native.bytes_per_token == 70_272
    # On several devices K has 128 + 64 values and V has 128, for each of 128 heads.
    assert native.on(8).bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert native.bytes_per_token / native.on(8).bytes_per_token < 0.015


@pytest.mark.parametrize("name", model_names())
def test_the_sizes_give_the_published_parameters(name: str) -> None:
    model = published(name)
    shape = model_shape(model.config)
    # Layers with a state are counted as attention, and some counts are published in whole billions.
    assert shape.parameters == pytest.approx(model.parameters, rel=0.013)
    active = matrix_parameters(shape) if name in _WITHOUT_EMBEDDINGS else shape.active_parameters
    assert active == pytest.approx(model.active_parameters, rel=0.085)
    assert shape.dense_parameters + shape.expert_parameters == shape.parameters


@pytest.mark.parametrize("name", model_names())
def test_each_model_says_where_its_figures_come_from(name: str) -> None:
    model = published(name)
    assert len(model.source) > 20
    assert find_model(model.hub_id.upper()) is not None
    assert model_shape(model.config).max_position > 0


def test_gemma_2_has_a_window_in_every_second_layer() -> None:
    kv = KvSize(model_shape(published("gemma-2-9b").config), "bf16", "compact")
    assert kv.bytes_per_old_token == 336 * 1024 / 2
    assert kv.sequence_bytes(8192) == 336 * 1024 * (8192 + 4096) / 2


def test_gpt_oss_has_a_window_of_128_in_every_second_layer() -> None:
    kv = KvSize(model_shape(published("gpt-oss-20b").config), "bf16", "compact")
    assert kv.sequence_bytes(100_000) == 24 * 1024 * (100_000 + 128)


@pytest.mark.parametrize(("users", "tokens"), [(50, 10_986), (5, 109_863)])
def test_the_budget_of_a_70b_model(users: int, tokens: int) -> None:
    """320 GB, 140 GB of weights, 80 layers, 8 KV heads of 128."""
    kv = KvSize(model_shape(published("llama-3.1-70b").config), "bf16", "native")
    assert longest_context(kv, free_bytes(320e9, 140e9, 0), users) == tokens


def test_a_70b_sequence_of_4096_tokens_takes_1_34_gb() -> None:
    kv = KvSize(model_shape(published("llama-2-70b").config), "fp16", "native")
    assert kv.sequence_bytes(4096) == 1_342_177_280
