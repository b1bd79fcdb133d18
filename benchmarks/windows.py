"""KV memory and time of a model with sliding windows: KV kept whole, and only as long as needed.

    python benchmarks/windows.py --windows 8

One thread, and a model with the layers of gemma-3-1b (22 of 26 with a window of 512 tokens), random
weights and a small vocabulary, in bfloat16. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.kvcache.window_parts import BlockUnits
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.machine import processor_name
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

BLOCK_SIZE = 32
CHUNK = 512
WINDOW = 512
DECODED = 64


def save_model(folder: str) -> None:
    """Saves a model with seeded random weights in bfloat16. Source of the sizes: config.json of
    google/gemma-3-1b-it.
    """
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=4096,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=WINDOW,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run(runner: ModelRunner, tokens: int) -> dict[str, float]:
    """Prefills a prompt in chunks, then decodes. Returns seconds and bytes."""
    cache = KvCache(
        runner.num_blocks,
        BLOCK_SIZE,
        prefix_cache=False,
        windows=runner.windows,
        capacity=BlockUnits.in_memory(runner.layout, runner.kv_bytes),
        memory=runner.kv.vacated if runner.windows else None,
    )
    prompt = tuple(2 + i % 4000 for i in range(tokens))
    spec = SequenceSpec("r", 0, prompt, tokens, SamplingParams(seed=0))
    sequence = Sequence(spec, 0.0, cache.hasher(""))
    before, seconds, stored = runner.kv.stored_bytes, [], 0
    moved = 0.0
    sequence.take_blocks(cache, tokens)
    while len(sequence.tokens) < tokens + DECODED:
        start, count = sequence.num_computed, min(CHUNK, sequence.uncomputed)
        began = time.perf_counter()
        runner.run([Segment(sequence.tokens[start : start + count], start, sequence.blocks)])
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        sequence.advance(cache, count)
        if not sequence.uncomputed:
            runner.kv.vacated.settle()
            stored = max(stored, runner.kv.stored_bytes - before)
            sequence.tokens.append(5)
            sequence.take_blocks(cache, len(sequence.tokens))
        moved += time.perf_counter() - began
    sequence.drop_blocks(cache)
    chunks = -(-tokens // CHUNK)
    return {
        "prefill_s": sum(seconds[:chunks]),
        "decode_ms": 1e3 * statistics.median(seconds[chunks:]),
        "accounting_share": moved / sum(seconds),
        "kv_bytes": stored,
    }


def main() -> None:
    """Prints one JSON object for each way to keep KV, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--windows", type=int, default=8, help="length of the prompt in windows")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = options.windows * WINDOW
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        runners = {
            kind: ModelRunner.of(
                load_model(folder),
                kv_bytes=2**30,
                block_size=BLOCK_SIZE,
                max_model_len=tokens + 2 * CHUNK,
                step_tokens=step_tokens,
            )
            for kind, step_tokens in (("whole", None), ("as needed", CHUNK))
        }
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in runners}
        for _ in range(options.runs):
            for kind, runner in runners.items():
                rows[kind].append(run(runner, tokens))
    for kind, those in rows.items():
        found[kind] = {name: statistics.median(one[name] for one in those) for name in those[0]}
        # Pages that a run leaves are no new ones of the next.
        found[kind]["kv_bytes"] = max(one["kv_bytes"] for one in those)
        print(json.dumps({"kv": kind, **{k: round(v, 5) for k, v in found[kind].items()}}))
    whole, needed = found["whole"], found["as needed"]
    print(
        json.dumps(
            {
                "processor": processor_name(),
                "prompt_tokens": tokens,
                **{f"{name}_ratio": round(needed[name] / whole[name], 3) for name in whole},
            }
        )
    )


if __name__ == "__main__":
    main()
