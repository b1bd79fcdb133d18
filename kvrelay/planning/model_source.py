"""The model that a plan is for: its sizes and its weights. Pure; reading files is the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kvrelay.errors import FailedPrecondition
from kvrelay.models.model_files import StoredTensor
from kvrelay.models.model_shape import ModelShape, model_shape
from kvrelay.planning.model_memory import WEIGHT_DTYPES, ModelMemory
from kvrelay.planning.model_table import PublishedModel
from kvrelay.planning.quantity import number_of

# Names of dtypes in config.json.
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "mxfp4": "mxfp4"}
# Relative difference of parameters above which config.json and the weights contradict each other.
_TOLERANCE = 0.25
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, as a plan shows it."""

    name: str
    shape: ModelShape
    memory: ModelMemory
    # Dtype that KV has unless another one is given.
    kv_dtype: str
    # Where the sizes come from.
    source: str
    parameters: float
    active_parameters: float


def published(model: PublishedModel, weights: str | None) -> PlannedModel:
    """Returns a model of the built-in table. weights: a dtype, or None for the published one."""
    shape = model_shape(model.config)
    native = _SHORT.get(model.weights, model.weights)
    dtype = weights or native
    size = model.parameters * WEIGHT_DTYPES[dtype]
    told = f"{number_of(model.parameters, 4)} parameters x {WEIGHT_DTYPES[dtype]:.4g} B"
    if dtype == native and model.weight_bytes:
        size, told = model.weight_bytes, "published checkpoint"
    memory = ModelMemory(shape, size, dtype, told)
    return PlannedModel(
        model.name, shape, memory, "bf16", model.source, model.parameters, model.active_parameters
    )


def described(
    name: str,
    config: Mapping[str, Any],
    weights: str | None,
    tensors: Sequence[StoredTensor] | None = None,
) -> PlannedModel:
    """Returns the model of a config.json. tensors: those of its files of weights, if they are
    there.

    Raises ModelRefused for a config.json without sizes, and FailedPrecondition if the weights have
    other sizes than it says.
    """
    shape = model_shape(config)
    native = _native_dtype(config)
    dtype = weights or native
    size = shape.parameters * WEIGHT_DTYPES[dtype]
    told = f"{number_of(shape.parameters, 4)} parameters x {WEIGHT_DTYPES[dtype]:.4g} B"
    if tensors is not None:
        _check_parameters(name, shape, config, tensors)
        if weights is None:
            size, told = float(sum(one.num_bytes for one in tensors)), "files of the weights"
    source = "config.json; the parameters are computed from its sizes"
    if tensors is not None:
        source = "config.json and headers of the weights"
    return PlannedModel(
        name,
        shape,
        ModelMemory(shape, size, dtype, told),
        native if native in ("float32", "fp16") else "bf16",
        source,
        float(shape.parameters),
        float(shape.active_parameters),
    )


def _native_dtype(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method", ""))
        bits = quantized.get("bits")
        if method in ("fp8", "mxfp4"):
            return method
        if bits in (4, 8):
            return f"int{bits}"
    return _SHORT.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _check_parameters(
    name: str, shape: ModelShape, config: Mapping[str, Any], tensors: Sequence[StoredTensor]
) -> None:
    """Raises FailedPrecondition if the weights are those of another model."""
    if config.get("quantization_config") or any(one.dtype not in _FLOATS for one in tensors):
        return
    # Models for images and sound have more than the text model.
    if any(isinstance(one, dict) and "hidden_size" in one for one in config.values()):
        return
    held = sum(prod(one.shape) for one in tensors)
    said = shape.parameters
    if any(one.kind == "state" for one in shape.layers) or not said:
        return
    if abs(held - said) > _TOLERANCE * said:
        raise FailedPrecondition(
            f"{name}: config.json describes {number_of(said, 4)} parameters, and the "
            f"files of the weights hold {number_of(held, 4)}; they belong to different "
            "models"
        )
