"""Builds a small configuration of any causal language model of transformers. Shrinks the default
configuration by the names of its fields.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCAB = 128
MAX_LEN = 192
# Tokens.
WINDOW = 8
LAYERS = 4
EOS = 1

# The first pattern that matches a whole name gives its value; None drops the field, so that the
# class computes it.
_RULES: tuple[tuple[str, Any], ...] = (
    (
        r"(layer|mlp_layer|attn_layer|indexer|block)_types?|layers_block_type|attention_(layers|types)",
        None,
    ),
    (
        r"layer_type_list|hybrid_layer_ids|full_attn_idxs|no_rope_layers|moe_layers|block_configs",
        None,
    ),
    (
        r"activation_sparsity_pattern|per_layer_config|num_attention_heads_per_layer|mtp_layers_block_type",
        None,
    ),
    (r"(id|label)2(label|id)|num_labels|torch_dtype|transformers_version|architectures", None),
    (r"eos_token_id", EOS),
    (r"(bos|pad|unk|decoder_start|forced_eos|forced_bos|cls|sep)_token_id", 0),
    (r".*token_(id|index)", VOCAB - 1),
    (r"unk_index|mask_index|pad_index", 0),
    (r"type_vocab_size|task_type_vocab_size", 2),
    (r"(unpadded_|decoder_)?vocab_size(_per_layer_input)?", VOCAB),
    (r".*vocab_size.*", 32),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length",
        MAX_LEN,
    ),
    (r"max_source_positions|model_max_length|max_sequence_length", MAX_LEN),
    (r"original_max_position_embeddings", MAX_LEN),
    (
        r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|num_(encoder|decoder|hidden)_layers|depth|num_blocks",
        LAYERS,
    ),
    (r".*(attention_heads|attn_heads)|n_heads?|num_heads|num_query_groups", 4),
    (r"(num_key_value|num_kv|swa_num_key_value)_heads?.*", 2),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_rank|hc_lowrank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"v_head_dim", 12),
    (r".*head_dim|d_head|d_kv|dim_head|attention_head_size", 16),
    (r"query_pre_attn_scalar", 16),
    (
        r"sliding_window_pattern|_sliding_window_pattern|.*_interval|.*every_n_layers|attn_layer_period",
        2,
    ),
    (r"expert_layer_period", 2),
    (r".*layer_offset", 1),
    (r"attention_chunk_size|.*window(_size)?", WINDOW),
    (r"max_window_layers", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"mlp_only_layers", []),
    (r"num_kv_shared_layers|num_nextn_predict_layers|.*mtp.*layers", 0),
    (r"n_group|num_expert_group|topk_group|n_groups|o_groups", 1),
    (r".*num_shared_experts|n_shared_experts|.*num_null_experts|zero_expert_num", 1),
    (r".*num_(local_|routed_)?experts|n_routed_experts|num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_(k|top_?k)|moe_topk|top_k_experts|num_selected_experts", 2),
    (
        r"(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|embed_dim|word_embed_proj_dim)",
        64,
    ),
    (r"attention_hidden_size|lru_width|backbone_hidden_size|output_embedding_size|hidden_dim", 64),
    (
        r"(.*intermediate_size|.*ffn_dim|.*ffn_hidden_size|n_inner|d_inner|dff|dim_ff|feed_forward_size|mlp_dim)",
        96,
    ),
    (
        r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_(key|value)_heads|lightning_n_heads",
        4,
    ),
    (r"mamba_d_head|mamba_head_dim|linear_(key|value)_head_dim", 32),
    (r"state_size|ssm_state_size|mamba_d_state|mamba_d_ssm", 16),
)
# Upper bound for numbers without a rule.
_LARGEST = 64

_ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_kv_shared_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}

# Fields without a rule whose default is missing or does not match small sizes.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            one: {"rope_type": "default", "rope_theta": 10000.0}
            for one in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_vision_encoder": {"per_layer_config": {}},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    # Its layers add up, and the middle ones run several times.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _ASSISTANT},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [12, 16], "axial_pos_embds_dim": [16, 48]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(model_type: str) -> PretrainedConfig:
    """Returns the configuration. Raises the exception of the class if it rejects the values."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_small(kind, _defaults(model_type)))


def _defaults(model_type: str) -> dict[str, Any]:
    """Returns the default fields; empty if the class rejects its own defaults."""
    try:
        return dict(CONFIG_MAPPING[model_type]().to_dict())
    except Exception:  # noqa: BLE001 - classes raise different exceptions
        return {}


def _small(kind: type[PretrainedConfig], fields: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    subs = getattr(kind, "sub_configs", {})
    for name, value in fields.items():
        if name in subs:
            if isinstance(value, dict):
                kind_of_part = CONFIG_MAPPING.get(value.get("model_type", ""), subs[name])
                small[name] = {
                    **_small(kind_of_part, value),
                    "model_type": value.get("model_type", ""),
                }
            continue
        if name == "model_type":
            continue
        found = _value(name, value)
        if found is not None:
            small[name] = found
    heads = {one: fields.get(one) for one in ("num_attention_heads", "num_key_value_heads")}
    if len(set(heads.values())) == 1 and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    # The class computes the head size from this field.
    if "qk_rope_head_dim" in small:
        small.pop("head_dim", None)
        small.pop("qk_head_dim", None)
    if fields.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = 2
    if "is_decoder" in fields and not fields.get("is_encoder_decoder"):
        small["is_decoder"] = True
    small["initializer_range"] = 0.3
    return {**small, **OVERRIDES.get(getattr(kind, "model_type", ""), {})}


def _value(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    for pattern, found in _RULES:
        if re.fullmatch(pattern, name):
            return found
    if isinstance(value, int) and value > _LARGEST:
        return _LARGEST
    return value
