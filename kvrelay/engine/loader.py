"""Loads a transformers causal LM, or says why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvrelay.engine import attention
from kvrelay.engine.checkpoint import find_checkpoint
from kvrelay.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    config: PretrainedConfig  # of the text model, where there are several
    model_id: str
    dtype: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    weight_bytes: int


def load_model(path: str, *, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """The model in a folder, or of a hub id, in evaluation mode with paged attention. Raises ModelRefused."""
    checkpoint = find_checkpoint(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path}: {error}") from error
    if not model._supports_attention_backend:
        raise ModelRefused(f"{path}: {type(model).__name__} has no attention backend")
    model = model.to(device).eval().requires_grad_(False)
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        config=config,
        model_id=checkpoint.model_id,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=_eos_token_ids(model),
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        weight_bytes=_weight_bytes(model),
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end an answer: the generation config's where there is one, else the config's."""
    generation: Any = model.generation_config
    for source in (generation, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())
