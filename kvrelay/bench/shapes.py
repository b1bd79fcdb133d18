"""Models that are given by their shape alone. Their random weights are created on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from kvrelay.errors import InvalidArgument

DTYPE = "bfloat16"
NAMED = {
    "m200": LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_id=128001,
    ),
}


def shape_config(shape: str) -> PretrainedConfig:
    """Returns a named shape, or the config.json of a folder. Raises InvalidArgument for an unknown
    name or an unreadable config.
    """
    if shape in NAMED:
        return NAMED[shape]
    if not (Path(shape) / "config.json").is_file():
        raise InvalidArgument(
            f"--model-shape {shape!r} is unknown; allowed are {', '.join(NAMED)} and a folder "
            "with a config.json",
            field="model_shape",
        )
    try:
        return AutoConfig.from_pretrained(shape, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{shape}: transformers cannot read it: {error}", field="model_shape"
        ) from error


def random_model(shape: str, device: str, **options: Any) -> PreTrainedModel:
    """Returns a bfloat16 model with random weights on `device`. On the meta device, the model takes
    no memory. `options` are passed to `from_config`.
    """
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape_config(shape), dtype=getattr(torch, DTYPE), **options
        )
    return model.eval()
