"""LoRA adapters with random factors, in PEFT's format, and models with an adapter merged into their
weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

PREFIX = "base_model.model."
LAYERS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def targets_of(architecture: str) -> tuple[str, ...]:
    """The names of all linear layers."""
    return LAYERS.get(architecture, LAYERS["llama"])


def save_adapter(
    folder: Path,
    base: Path,
    *,
    targets: tuple[str, ...] = LAYERS["llama"],
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    settings: Mapping[str, Any] | None = None,
    rank_of: Callable[[str], int] | None = None,
) -> Path:
    """Saves an adapter of the model in `base` as PEFT does, and returns its folder."""
    layers = linear_layers(base, targets)
    tensors = random_factors(layers, rank=rank, seed=seed, size=size, rank_of=rank_of)
    write_adapter(folder, tensors, {"r": rank, "target_modules": list(targets), **(settings or {})})
    return folder


def save_adapters(folder: Path, base: Path, count: int, *, rank: int = 4) -> dict[str, Path]:
    """Saves `count` adapters of all linear layers, which differ in their seeds. Returns their
    folders by name. Loads the model once.
    """
    layers = linear_layers(base, LAYERS["llama"])
    settings = {"r": rank, "target_modules": list(LAYERS["llama"])}
    found = {f"lora-{seed}": folder / f"lora-{seed}" for seed in range(count)}
    for seed, path in enumerate(found.values()):
        write_adapter(path, random_factors(layers, rank=rank, seed=seed), settings)
    return found


def linear_layers(base: Path, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the model's layers with these names, by full name."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return {
        name: shape_of(module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets
    }


def random_factors(
    layers: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    seed: int,
    size: float = 0.3,
    rank_of: Callable[[str], int] | None = None,
) -> dict[str, torch.Tensor]:
    """Random factors of these layers, by the names that PEFT gives them."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in layers.items():
        own = rank if rank_of is None else rank_of(name)
        a = size * torch.randn(own, inputs, generator=random)
        b = size * torch.randn(outputs, own, generator=random)
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
    return tensors


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Writes the two files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "bias": "none",
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )


def shape_of(module: torch.nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer. The weight of gpt2's layers is transposed."""
    first, second = module.weight.shape  # type: ignore[misc]
    return (second, first) if type(module).__name__ == "Conv1D" else (first, second)


def merged(base: Path, adapter: Path | None) -> PreTrainedModel:
    """The base model with W + scale · B A for the weight W of each layer that the adapter changes,
    where scale is alpha / rank, or alpha / sqrt(rank) with use_rslora.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        a = tensors.get(f"{PREFIX}{name}.lora_A.weight")
        if a is None:
            continue
        alpha = config["lora_alpha"]
        for pattern, value in config["alpha_pattern"].items():
            if re.search(rf"(^|\.){pattern}$", name):
                alpha = value
        scale = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
        update = scale * (tensors[f"{PREFIX}{name}.lora_B.weight"].float() @ a.float())
        module.weight.data += update.T if type(module).__name__ == "Conv1D" else update
    return model


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """The next `count` tokens, by transformers alone."""
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False
    )
    return list(output[0, len(prompt) :].tolist())
