"""The memory of a model: the KV of its tokens, and its weights, from config.json and the headers of
the weights. Without a model library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvrelay.errors import ModelRefused
from kvrelay.models.model_files import StoredTensor
from kvrelay.models.model_json import text_config
from kvrelay.models.model_shape import model_shape
from kvrelay.types.kv_layout import DTYPE_BYTES, FLOAT_DTYPES, KvLayout, LayerKv

# Parts of the names of embeddings, which stay in the model's dtype.
_EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe")
_HEADS = ("lm_head", "embed_out")
# Dtypes of safetensors that are converted to the dtype of the model.
_FLOATS = ("F64", "F32", "F16", "BF16")


def kv_layout(
    model: Mapping[str, Any],
    block_size: int,
    kv_dtype: str,
    dtype: str,
    *,
    latents: bool = True,
    windows_below: int = 0,
) -> KvLayout | None:
    """Returns the layout of the model's KV. Returns None for a configuration without the usual
    sizes, whose layout is known when the model is loaded.

    model: the content of config.json. block_size: tokens. kv_dtype: int8, int4, or auto for the
    dtype of the model. dtype: in which the model computes, from `model_dtype`. latents: as in
    `load_model`. windows_below: blocks may lack the KV of windows of fewer tokens than this, if
    that saves memory.
    """
    try:
        layers = model_shape(model).layers
    except ModelRefused:
        return None
    held = dtype if kv_dtype == "auto" else kv_dtype
    kept = tuple(
        LayerKv(1, layer.latent, layer.latent_rank, v_in_k=True)
        if latents and layer.latent
        else layer.kv
        for layer in layers
        if layer.kv is not None
    )
    # A layer with a state, or with the KV of another one, is refused when the model is loaded.
    if len(kept) < len(layers):
        return None
    windows = tuple(one.window if one.window < windows_below else 0 for one in layers)
    return KvLayout(kept, block_size, held).with_windows(windows)


def model_dtype(model: Mapping[str, Any], dtype: str) -> str:
    """Returns the dtype in which the model computes: `dtype`, or for auto the one in config.json.
    A dtype that KV cannot have, or none, becomes bfloat16.
    """
    wanted = str(model.get("dtype") or model.get("torch_dtype")) if dtype == "auto" else dtype
    return wanted if wanted in FLOAT_DTYPES else "bfloat16"


def longest_sequence(model: Mapping[str, Any], max_model_len: int | None) -> int | None:
    """Returns the tokens of the longest sequence that the model and the configuration allow.
    Returns None for a configuration without the usual keys.
    """
    text = text_config(model)
    limits = [limit for limit in (max_model_len, *_longrope_limits(text)) if limit is not None]
    limits.append(text.get("max_position_embeddings"))
    return min(limits) if all(map(_is_size, limits)) else None


def weight_bytes(
    tensors: Sequence[StoredTensor],
    dtype: str,
    weights: Literal["auto", "int8"],
    *,
    packs: bool,
) -> int:
    """Returns the bytes of the weights in memory, without what packing adds to odd sizes.

    dtype: in which the model computes. weights: int8 keeps the matrices of linear layers except the
    head in 8 bits, with a scale of 4 bytes per output. packs: whether linear layers are packed for
    the CPU kernels, which copies a head that shares its weights with the embeddings.
    """
    total = sum(
        math.prod(tensor.shape) + 4 * tensor.shape[0]
        if weights == "int8" and _is_linear(tensor)
        else _bytes_as(tensor, dtype)
        for tensor in tensors
    )
    if packs and not any(_has(tensor, _HEADS) for tensor in tensors):
        embeddings = (_bytes_as(one, dtype) for one in tensors if _has(one, _EMBEDDINGS))
        total += max(embeddings, default=0)
    return total


def _is_linear(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and not _has(tensor, _EMBEDDINGS + _HEADS)


def _has(tensor: StoredTensor, parts: tuple[str, ...]) -> bool:
    return any(part in tensor.name for part in parts)


def _bytes_as(tensor: StoredTensor, dtype: str) -> int:
    if tensor.dtype not in _FLOATS:
        return tensor.num_bytes
    return math.prod(tensor.shape) * DTYPE_BYTES[dtype]


def _longrope_limits(model: Mapping[str, Any]) -> list[Any]:
    """Returns the lengths at which the frequencies of LongRoPE change, where the engine ends."""
    ropes = [
        rope
        for rope in (model.get("rope_scaling"), model.get("rope_parameters"))
        if isinstance(rope, dict)
    ]
    types = [rope.get(key) for rope in ropes for key in ("rope_type", "type")]
    if "longrope" not in types and "su" not in types:
        return []
    return [one.get("original_max_position_embeddings") for one in (model, *ropes)]


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
