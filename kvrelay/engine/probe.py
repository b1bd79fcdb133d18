"""Finds a model's KV shape by what reaches its attention, not by the names in its configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from kvrelay.engine import attention
from kvrelay.engine.loader import LoadedModel
from kvrelay.errors import ModelRefused
from kvrelay.types import DTYPE_BYTES, LayerKv

NAME = "kvrelay_probe"


def probe_layers(loaded: LoadedModel) -> tuple[tuple[LayerKv, ...], str]:
    """KV of each layer and its dtype, from a forward pass over two tokens. Raises ModelRefused."""
    calls: list[tuple[int, LayerKv, str]] = []

    def record(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        layer = LayerKv(key.shape[1], key.shape[-1], value.shape[-1])
        calls.append((module.layer_idx, layer, str(key.dtype).removeprefix("torch.")))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(NAME, record)
    model = loaded.model
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    model.set_attn_implementation(NAME)
    with torch.inference_mode():
        model(input_ids=tokens, position_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    model.set_attn_implementation(attention.NAME)
    indices = [index for index, _, _ in calls]
    if indices != list(range(loaded.config.num_hidden_layers)):
        raise ModelRefused(f"attention of layers {indices} of {loaded.config.num_hidden_layers}")
    dtypes = {dtype for _, _, dtype in calls}
    if len(dtypes) != 1 or not dtypes <= DTYPE_BYTES.keys():
        raise ModelRefused(f"KV of dtype {dtypes}")
    return tuple(layer for _, layer, _ in calls), dtypes.pop()
