"""Tiny transformers models with random weights, one for each architecture, to save and load as
users do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 128
MAX_LEN = 192
WINDOW = 8  # tokens; shorter than the prompts of the tests
EOS = 1

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATE: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**_ALTERNATE, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 12},
    "gemma3_text": {**_ALTERNATE, "query_pre_attn_scalar": 12},
    "phi3": {"num_key_value_heads": 4, "sliding_window": WINDOW},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {**_EXPERTS, "moe_intermediate_size": 32},
    "gpt_oss": {**_EXPERTS, **_ALTERNATE},
    "smollm3": {},
    "gpt2": {"n_inner": 64, "num_key_value_heads": None, "head_dim": None},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
}


def build(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Saves a model of `architecture` with weights from a fixed seed, in float32, and returns its
    folder.
    """
    settings = {**BASE, **SERVED.get(architecture, {}), **overrides}
    config = AutoConfig.for_model(
        architecture, **{k: v for k, v in settings.items() if v is not None}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
