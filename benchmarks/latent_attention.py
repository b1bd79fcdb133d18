"""The time of steps with latent attention: over latent vectors, and over K and V, in turn.

    python benchmarks/latent_attention.py --heads 16

One thread, a model of four layers with random weights and the attention of DeepSeek-V2-Lite: a
latent vector of 512 values and 64 values with positions. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.machine import processor_name

BLOCK_SIZE = 16
CHUNK = 512
# (batch, context) of decode steps.
STEPS = ((1, 512), (8, 512), (1, 4096), (8, 4096))
PROMPTS = (512, 2048)
_KV_BYTES = 2**31


def save_model(folder: str, heads: int) -> None:
    """Saves a model with seeded random weights in bfloat16."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=2048,
        hidden_size=64 * heads,
        intermediate_size=128 * heads,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def decode_s(runner: ModelRunner, batch: int, context: int) -> float:
    """Returns the seconds of one decode step. What the blocks hold does not matter."""
    blocks = -(-(context + 1) // BLOCK_SIZE)
    segments = [
        Segment([2 + place], context, range(place * blocks, (place + 1) * blocks))
        for place in range(batch)
    ]
    began = time.perf_counter()
    runner.run(segments)
    return time.perf_counter() - began


def prefill_s(runner: ModelRunner, tokens: int) -> float:
    """Returns the seconds of the prefill of one prompt, in chunks."""
    prompt = [2 + i % 2000 for i in range(tokens)]
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        end = min(start + CHUNK, tokens)
        runner.run([Segment(prompt[start:end], start, range(-(-end // BLOCK_SIZE)))])
    return time.perf_counter() - began


def main() -> None:
    """Prints one JSON object per kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runners = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.heads)
        for latents in (True, False):
            loaded = load_model(folder, latents=latents)
            runners["latent" if latents else "expanded"] = ModelRunner.of(
                loaded, kv_bytes=_KV_BYTES, block_size=BLOCK_SIZE
            )
    cases = {f"decode, batch {one[0]}, context {one[1]}": (decode_s, one) for one in STEPS}
    cases |= {f"prefill of {tokens} tokens": (prefill_s, (tokens,)) for tokens in PROMPTS}
    for name, (measure, shape) in cases.items():
        found: dict[str, list[float]] = {kind: [] for kind in runners}
        for _ in range(options.runs + 1):
            for kind, runner in runners.items():
                found[kind].append(measure(runner, *shape))
        row = {
            f"{kind}_ms": round(1e3 * statistics.median(one[1:]), 2) for kind, one in found.items()
        }
        print(json.dumps({"step": name, **row}), flush=True)
    sizes = {
        f"{kind}_bytes_per_token": one.layout.block_bytes // BLOCK_SIZE
        for kind, one in runners.items()
    }
    print(json.dumps({"processor": processor_name(), "heads": options.heads, **sizes}))


if __name__ == "__main__":
    main()
