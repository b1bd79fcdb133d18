"""Sizes that are read from config.json, beside those of the models that transformers builds from
the same configuration.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrelay.errors import ModelRefused
from kvrelay.models.model_shape import ModelShape, model_shape
from kvrelay.models.shape_keys import ShapeKeys
from kvrelay.planning.kv_size import KvForm, KvSize

# Sizes that keep the models small. Each family ignores those that it does not know.
TINY: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "gemma4_text": {
        "head_dim": 16,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
    },
    "persimmon": {"num_key_value_heads": None},
    "qwen2": {},
}
# Families whose sizes are not computed: see `_notes` of the plan. Layers with states are counted as
# attention; towers for images and sound, and layers that share weights, are not known.
ESTIMATED = {
    *("beam", "doge", "falcon_h1", "jamba", "gemma3", "granitemoehybrid"),
    *(
        "gemma4",
        "gemma4_unified",
        "gemma4_unified_assistant",
        "got_ocr2",
        "jetmoe",
    ),
    *(
        "lfm3",
        "mllama",
        "moshi",
        "moss_transcribe_diarize",
    ),
    *("olmo_hybrid", "phi4_multimodal", "recurrent_gemma", "zamba", "zamba2", "lfm2_moe", "bamba"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "fuyu"),
}
# A cross-attention layer keeps the KV of an image, not of the tokens.
OTHER_KV = {"mllama"}


def built(config: PreTrainedConfig) -> torch.nn.Module:
    """Returns the model without memory for its weights."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def kv_values(model: torch.nn.Module, tokens: int = 7) -> float:
    """Returns the values that transformers' own cache keeps of a token."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
    kept = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return float(sum(one.keys.numel() + one.values.numel() for one in kept) / tokens)


def read(config: PreTrainedConfig) -> ModelShape:
    return model_shape(json.loads(config.to_json_string(use_diff=False)))


def check(config: PreTrainedConfig, tolerance: float, model: torch.nn.Module, kv: float) -> None:
    """Parameters are those of the model, up to biases and norms; KV is exact."""
    shape = read(config)
    held = sum(one.numel() for one in model.parameters())
    if config.model_type not in ESTIMATED:
        assert shape.parameters == pytest.approx(held, rel=tolerance)
    form: KvForm = "compact" if any(one.kind == "latent" for one in shape.layers) else "native"
    if config.model_type not in OTHER_KV:
        assert KvSize(shape, "fp8", form).bytes_per_token == kv


@pytest.mark.parametrize("family", TINY)
def test_a_small_model_has_the_sizes_that_config_json_gives(family: str) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        **TINY[family],
    }
    given_sizes = {name: value for name, value in sizes.items() if value is not None}
    config = AutoConfig.for_model(family, **given_sizes)
    model = built(config)
    check(config, 0.03, model, kv_values(model))


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_the_default_model_of_each_family_has_the_sizes_that_config_json_gives(
    family: str,
) -> None:
    try:
        config = AutoConfig.for_model(family)
        shape = read(config)
        model = built(config)
        kv = kv_values(model)
    except ModelRefused:
        return
    # Some classes have defaults that do not fit together.
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"transformers does not run its default configuration: {error!s:.80}")
    assert shape.layers
    check(config, 0.025, model, kv)


LAYERS = st.integers(1, 12)


@given(LAYERS, st.data())
def test_a_layer_has_the_keys_that_its_own_configuration_overrides(
    layers: int, data: st.DataObject
) -> None:
    dims = data.draw(st.dictionaries(st.integers(0, layers - 1), st.integers(1, 64)))
    width = data.draw(st.integers(1, 3))
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 100,
        "per_layer_config": {f"{index:0{width}}": {"head_dim": dims[index]} for index in dims},
    }
    expected = sum(2 * 2 * dims.get(index, 16) for index in range(layers))
    assert KvSize(model_shape(config), "fp8", "native").bytes_per_token == expected


@given(st.sampled_from([[], 5, "x", True, {"0": 5}, {"0": []}, {"0": {"head_dim": -1}}]))
def test_overrides_that_are_no_mapping_are_refused(given_value: Any) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "per_layer_config": given_value}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    with pytest.raises(ModelRefused, match=r"per_layer_config|head_dim"):
        model_shape({**config, **sizes})


def test_a_model_that_runs_its_layers_several_times_is_refused() -> None:
    with pytest.raises(ModelRefused, match="n_recurrent_loops is 2"):
        ShapeKeys.of({"model_type": "dory", "n_recurrent_loops": 2})
    assert ShapeKeys.of({"model_type": "dory", "n_recurrent_loops": 1}).model_type == "dory"
