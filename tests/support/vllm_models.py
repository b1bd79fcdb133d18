"""Tiny models with random weights, most of kinds that the native engine refuses: a hybrid one,
multimodal ones, GPTQ and AWQ checkpoints. They have the demo model's tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import kvrelay.models

Build = Callable[[str], Path]
"""Returns the folder of a family's model."""

DEMO = Path(kvrelay.models.__file__).parent / "demo"
VOCAB = 2048
MAX_LEN = 1024
# Tokens; shorter than the prompts of the tests.
WINDOW = 16
# Input channels that share a scale.
_GROUP = 32
_BITS = 4
_PER_WORD = 32 // _BITS
# Output channels of an AWQ word, from its lowest bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "mistral": {"sliding_window": WINDOW},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 32,
        # The latent sizes of the kernels.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "moe_intermediate_size": 32,
    },
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    # Its class needs torchvision, which the environment of these tests does not have.
    "llava": {
        "text_config": {**_BASE, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": 5,
    },
    "idefics3": {
        "text_config": {**_BASE, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
        "image_token_id": 5,
        "scale_factor": 1,
        "pad_token_id": 0,
    },
}


def build(family: str, folder: Path) -> Path:
    """Saves the model of this family with weights from a fixed seed, and returns its folder."""
    if family in QUANTISED:
        return _quantised(family, folder)
    settings = TEXT.get(family) or MULTIMODAL.get(family, {})
    auto: Any = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    wanted = settings if family in MULTIMODAL else {**_BASE, **settings}
    config = AutoConfig.for_model(family, **{k: v for k, v in wanted.items() if v is not None})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(DEMO / "chat_template.jinja", folder)
    return folder


def _packed(values: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Packs 4-bit values along `dim` into int32; word position i holds value `order[i]`."""
    groups = values.to(torch.int64).unflatten(dim, (-1, _PER_WORD)).movedim(dim + 1, 0)
    words = sum(groups[one] << (_BITS * place) for place, one in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def _gptq(values: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """values: [in, out] of 0 to 15, of which 8 is zero."""
    plain = tuple(range(_PER_WORD))
    # The format stores each zero point less one.
    zeros = torch.full_like(scales, 7)
    return {
        "qweight": _packed(values, 0, plain),
        "qzeros": _packed(zeros, 1, plain),
        "scales": scales,
        "g_idx": torch.arange(len(values), dtype=torch.int32) // _GROUP,
    }


def _awq(values: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """values: [in, out] of 0 to 15, of which 8 is zero."""
    return {
        "qweight": _packed(values, 1, _AWQ_ORDER),
        "qzeros": _packed(torch.full_like(scales, 8), 1, _AWQ_ORDER),
        "scales": scales,
    }


QUANTISED: dict[str, tuple[dict[str, Any], Callable[..., dict[str, torch.Tensor]]]] = {
    "gptq": ({"group_size": _GROUP, "desc_act": False, "sym": True}, _gptq),
    "awq": ({"group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq),
}


def _quantised(method: str, folder: Path) -> Path:
    """A llama model whose linear layers are packed in 4 bits."""
    build("llama", folder)
    settings, pack = QUANTISED[method]
    weights = load_file(folder / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if "_proj" not in name:
            packed[name] = weight
            continue
        groups = weight.T.unflatten(0, (-1, _GROUP))
        scales = groups.abs().amax(1).clamp_min(1e-6) / 7
        values = (groups / scales[:, None]).round().clamp(-8, 7).flatten(0, 1) + 8
        packed |= {
            name.replace("weight", kind): tensor
            for kind, tensor in pack(values, scales.half()).items()
        }
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": _BITS, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
