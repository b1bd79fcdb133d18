"""What vLLM's configuration tells before a model is loaded. Nothing here imports vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, ModelRefused
from kvrelay.types.workers import PoolName
from kvrelay.vllm_engine.arguments import engine_arguments
from kvrelay.vllm_engine.engine_config import check_handoff, reason, text_only

PYDANTIC = """1 validation error for ModelConfig
  Value error, torch.float32 is not supported. [type=value_error, input_value=Args((), {'a': 1})]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(PYDANTIC), "torch.float32 is not supported"),
        (ValueError("1 validation error for X\nseed\n  must be a number"), "seed must be a number"),
        (RuntimeError("no kernel.\nat line 3"), "RuntimeError: no kernel"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_reason_is_one_line(error: Exception, text: str) -> None:
    assert reason(error) == text


@pytest.mark.parametrize(
    ("pool", "prefill", "one_kind"),
    [("prefill", 1, True), ("decode", 1, True), ("prefill", 0, True), ("decode", 0, None)],
)
def test_where_kv_is_handed_over_all_layers_have_blocks_of_one_kind(
    pool: PoolName, prefill: int, one_kind: bool | None
) -> None:
    config = ClusterConfig.model_validate(
        {"prefill": {"engine": "vllm", "replicas": prefill}, "decode": {"engine": "vllm"}}
    )
    made = engine_arguments(config, pool, "/model")
    assert made["disable_hybrid_kv_cache_manager"] is one_kind
    assert made["language_model_only"], "requests bring text alone"


def made(block_size: int = 32, **model: Any) -> Any:
    facts = {"is_hybrid": False, "is_attention_free": False, "has_inner_state": False} | model
    return SimpleNamespace(
        model_config=SimpleNamespace(architectures=["XForCausalLM"], **facts),
        cache_config=SimpleNamespace(block_size=block_size),
    )


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        ("is_hybrid", "some of its layers keep a state"),
        ("has_inner_state", "some of its layers keep a state"),
        ("is_attention_free", "each layer keeps a state"),
    ],
)
def test_a_state_is_not_handed_over(fact: str, text: str) -> None:
    with pytest.raises(ModelRefused, match=rf"/m: .*{text}.*XForCausalLM.*set prefill\.replicas"):
        check_handoff(made(**{fact: True}), 32, "/m")
    check_handoff(made(), 32, "/m")


def test_blocks_of_another_size_are_not_handed_over() -> None:
    with pytest.raises(ConfigError, match=r"kv\.block_size: 32, .* set kv\.block_size to 16"):
        check_handoff(made(block_size=16), 32, "/m")


def test_a_multimodal_model_is_prepared_for_text_alone() -> None:
    parts = SimpleNamespace(enable_mm_embeds=True, allow_missing_mm_embeddings=True)
    model = SimpleNamespace(skip_tokenizer_init=True, multimodal_config=parts)
    text_only(model)
    assert not model.skip_tokenizer_init, "vLLM makes its processor from the tokenizer"
    assert vars(parts) == {"enable_mm_embeds": False, "allow_missing_mm_embeddings": False}
