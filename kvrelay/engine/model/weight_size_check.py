"""Checks that a configuration matches the size of its weights, before memory for the model is
allocated.

transformers allocates the tensors that a checkpoint lacks or has in another shape. A configuration
with false sizes would therefore exhaust the machine's memory.
"""

from __future__ import annotations

import json
import math

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvrelay.engine.model.checkpoint import Checkpoint
from kvrelay.errors import ModelRefused

# Experts of a layer; creating each module takes time.
MOST_EXPERTS = 2**15
# Allowed ratio of the model's weights to those in the files. An output head that is tied is not in
# the files.
LARGER = 2
# The same ratio for quantised models, whose weights pack several numbers into one.
LARGER_QUANTISED = 16


def check_sizes(config: PretrainedConfig, checkpoint: Checkpoint) -> PreTrainedModel:
    """Returns the model on the meta device, without memory. Raises ModelRefused."""
    text = config.get_text_config()
    tensors = _shapes(checkpoint)
    num_layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        raise ModelRefused(
            f"{checkpoint.folder}: {type(text).__name__} has no num_hidden_layers, so the "
            "model is not a supported decoder"
        )
    if not 1 <= num_layers <= len(tensors):
        raise ModelRefused(
            f"{checkpoint.folder}: the configuration has {num_layers} layers, and the weights "
            f"have {len(tensors)} tensors"
        )
    for name, value in text.to_dict().items():
        if "expert" in name and isinstance(value, int) and value > MOST_EXPERTS:
            raise ModelRefused(
                f"{checkpoint.folder}: {name} is {value}; allowed are {MOST_EXPERTS}"
            )
    with torch.device("meta"):  # shapes without memory
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    found = sum(math.prod(shape) for shape in tensors)
    times = LARGER_QUANTISED if getattr(config, "quantization_config", None) else LARGER
    if wanted > times * found:
        raise ModelRefused(
            f"{checkpoint.folder}: the configuration requires {wanted} weights, and the files "
            f"contain {found}"
        )
    return model


def _shapes(checkpoint: Checkpoint) -> list[list[int]]:
    """Shapes of all tensors in the files of weights."""
    shapes = []
    for path in checkpoint.weights:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes += [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return shapes
