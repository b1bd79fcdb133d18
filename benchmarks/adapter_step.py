"""The cost of adapters in a decode step: a batch of 16 sequences with 8 adapters against the same
batch of the base model, step by step in alternation.

    python benchmarks/adapter_step.py --hidden 1024 --layers 8 --rank 16

Times are processor time of this process, with one thread. On a busy machine only the ratio of
medians taken in alternation means anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models.adapters.adapter_files import read_adapter

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BLOCK_SIZE = 32


def base_model(folder: Path, hidden: int, layers: int, dtype: str) -> PreTrainedModel:
    """Saves a llama with random weights, and returns it."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return model


def adapter(folder: Path, model: PreTrainedModel, rank: int, seed: int) -> Path:
    """Saves an adapter of all linear layers with random factors."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            outputs, inputs = module.weight.shape
            prefix = f"base_model.model.{name}"
            a = torch.randn(rank, inputs, generator=random) / 50
            b = torch.randn(outputs, rank, generator=random) / 50
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--weights", default="auto", choices=["auto", "int8"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--past", type=int, default=128, help="Tokens before the step.")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = base_model(folder / "base", options.hidden, options.layers, options.dtype)
        runner = ModelRunner.load(
            str(folder / "base"),
            kv_bytes=2**28,
            block_size=BLOCK_SIZE,
            threads=1,
            weights=options.weights,
            kernels=options.kernels,
            adapter_slots=options.adapters,
        )
        runner.adapters.find_sites()
        for seed in range(options.adapters):
            files = read_adapter(str(adapter(folder / f"{seed}", model, options.rank, seed)), 512)
            runner.adapters.install(runner.adapters.prepare(files, f"{seed}"))
    ids = runner.adapters.ids
    blocks = -(-(options.past + 1) // BLOCK_SIZE)

    def step(adapted: bool) -> float:
        segments = [
            Segment(
                [place + 2],
                options.past,
                range(place * blocks, (place + 1) * blocks),
                adapter=ids[place % len(ids)] if adapted else "",
            )
            for place in range(options.batch)
        ]
        began = time.process_time()
        runner.forward(segments, range(options.batch))
        return time.process_time() - began

    # The first steps of a shape run in Python, until it is captured.
    for _ in range(8):
        step(False), step(True)
    pairs = [(step(False), step(True)) for _ in range(options.steps)]
    plain, adapted = ([pair[i] for pair in pairs] for i in (0, 1))
    print(
        json.dumps(
            vars(options)
            | {
                "engine": runner.engine,
                "base_ms": round(1e3 * statistics.median(plain), 2),
                "adapted_ms": round(1e3 * statistics.median(adapted), 2),
                "ratio_of_medians": round(statistics.median(adapted) / statistics.median(plain), 3),
                "ratio_of_minima": round(min(adapted) / min(plain), 3),
            }
        )
    )
    runner.close()


if __name__ == "__main__":
    main()
