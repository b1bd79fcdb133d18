"""KV bytes beside what the engine allocates, and the properties of the sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import BASE, SERVED
from transformers import AutoConfig, AutoModelForCausalLM

from kvrelay.engine.attention import paged_attention
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.model.loader import LoadedModel, loaded_model
from kvrelay.errors import ModelRefused
from kvrelay.models.model_shape import ModelShape, model_shape
from kvrelay.models.model_size import kv_layout
from kvrelay.planning.kv_size import KV_DTYPES, KvSize
from kvrelay.planning.model_table import find_model, model_names

# Families besides those of the engine's own tests.
MORE: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "deepseek_v2": {**SERVED["deepseek_v3"], "q_lora_rank": None},
    "ernie4_5": {},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "nemotron": {},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 8},
}


def load(architecture: str, **sizes: Any) -> LoadedModel | None:
    """Returns a tiny model as the engine loads it; None if it refuses the architecture."""
    given = {**BASE, **SERVED.get(architecture, MORE.get(architecture, {})), **sizes}
    config = AutoConfig.for_model(architecture, **{k: v for k, v in given.items() if v is not None})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=paged_attention.NAME
    )
    try:
        return loaded_model(model, architecture, "")
    except ModelRefused:
        return None


def check(loaded: LoadedModel) -> None:
    """The bytes of an arena are those of its tokens."""
    config = loaded.config.to_dict()
    shape = model_shape(config)
    for dtype, name in (("auto", "bf16"), ("int8", "int8")):
        layout = loaded.layout(16, dtype)
        pool = KvPool(layout, 3)
        try:
            allocated = pool.buffer.nbytes
        finally:
            pool.close()
        assert KvSize(shape, name, "native").bytes_per_token * 16 * 3 == allocated
        planned = kv_layout(config, 16, dtype, "bfloat16")
        assert planned is not None
        assert planned.layers == loaded.kv_layers


@pytest.mark.parametrize("architecture", [*SERVED, *MORE])
def test_a_token_takes_what_the_engine_allocates(architecture: str) -> None:
    loaded = load(architecture)
    if loaded is None:
        assert architecture not in SERVED
        pytest.skip("the engine refuses this architecture")
    check(loaded)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["llama", "qwen3", "gemma2", "mixtral"]),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]),
    st.sampled_from([8, 12, 32]),
)
def test_any_sizes_take_what_the_engine_allocates(
    architecture: str, layers: int, heads: tuple[int, int], dim: int
) -> None:
    loaded = load(
        architecture,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=dim,
        layer_types=None,
    )
    assert loaded is not None
    check(loaded)


NAMES = st.sampled_from(model_names())
FORMS = st.sampled_from(["native", "compact"])


def shape_of(name: str) -> ModelShape:
    found = find_model(name)
    assert found is not None
    return model_shape(found.config)


@given(NAMES, FORMS, st.sampled_from(list(KV_DTYPES)), st.integers(1, 300_000))
def test_the_tokens_that_fit_are_the_inverse_of_the_bytes(
    name: str, form: Any, dtype: str, tokens: int
) -> None:
    kv = KvSize(shape_of(name), dtype, form)
    found = kv.tokens_in(kv.sequence_bytes(tokens))
    if math.isinf(found):
        # All layers have windows, and the sequence fills them.
        assert kv.sequence_bytes(tokens) == kv.sequence_bytes(10**9)
    else:
        assert math.isclose(found, tokens, rel_tol=1e-9)


@given(NAMES, st.sampled_from(list(KV_DTYPES)), st.integers(1, 300_000))
def test_a_sequence_is_the_sum_of_its_layers(name: str, dtype: str, tokens: int) -> None:
    """The naive sum, layer by layer and token by token."""
    shape = shape_of(name)
    scale = 2.0 if dtype in ("int8", "int4") else 0.0
    native = compact = 0.0
    for layer in shape.layers:
        if layer.kv is None:
            continue
        of_k = layer.kv.kv_heads * (layer.kv.k_dim * KV_DTYPES[dtype] + scale)
        of_v = layer.kv.kv_heads * (layer.kv.v_dim * KV_DTYPES[dtype] + scale)
        latent = layer.latent * KV_DTYPES[dtype] + scale
        native += tokens * (latent if layer.latent else of_k + of_v)
        kept = min(tokens, layer.window) if layer.window else tokens
        compact += kept * (latent if layer.latent else of_k + of_v)
    assert math.isclose(KvSize(shape, dtype, "native").sequence_bytes(tokens), native)
    assert math.isclose(KvSize(shape, dtype, "compact").sequence_bytes(tokens), compact)
    assert compact <= native


@given(NAMES, FORMS, st.sampled_from(["bf16", "fp16", "fp8", "float32"]))
def test_the_formula_is_an_expression_of_the_bytes(name: str, form: Any, dtype: str) -> None:
    kv = KvSize(shape_of(name), dtype, form)
    text = kv.formula
    for word in (" layers", " KV heads", " KV head", " latent values", " B"):
        text = text.replace(word, "")
    assert eval(text.replace("x", "*")) == kv.bytes_per_token
