"""Trains a small draft model for the bundled `demo` model, on the same generated text, and writes a
model folder for `decode.speculation: {kind: draft, model: DIR}`.

    python scripts/train_draft.py --out DIR [--layers N] [--hidden N] [--steps N] [--seed S]

One thread on one CPU core takes a few minutes. The tokenizer is the demo model's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train_demo import model_config, progress_bar, train
from transformers import GenerationConfig, LlamaForCausalLM

from kvrelay.models import DEMO, resolve_model

HEAD_DIM = 64
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def draft_model(tokenizer: Tokenizer, layers: int, hidden: int) -> LlamaForCausalLM:
    """Returns a model with random weights and the demo model's vocabulary. hidden: a multiple of
    64.
    """
    config = model_config(tokenizer)
    config.num_hidden_layers = layers
    config.hidden_size = hidden
    config.intermediate_size = 9 * hidden // 4
    config.num_attention_heads = hidden // HEAD_DIM
    config.num_key_value_heads = max(1, hidden // HEAD_DIM // 2)
    config.head_dim = HEAD_DIM
    return LlamaForCausalLM(config)


def project_embeddings(model: LlamaForCausalLM, demo: Path) -> None:
    """Begins with the demo model's embeddings, projected onto their main directions."""
    large = load_file(demo / "model.safetensors")["model.embed_tokens.weight"].float()
    width = model.config.hidden_size
    _, _, directions = torch.linalg.svd(large, full_matrices=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, : len(directions)] = (large @ directions.T)[
            :, :width
        ]


def run(out: Path, layers: int, hidden: int, steps: int, seed: int) -> int:
    """Trains and writes the folder `out`. Returns the number of parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    demo = Path(resolve_model(DEMO))
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    model = draft_model(tokenizer, layers, hidden)
    project_embeddings(model, demo)
    with progress_bar() as progress:
        train(model, tokenizer, seed, steps, progress, bfloat16=False)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig.from_pretrained(demo)
    model.save_pretrained(out)
    for name in TOKENIZER:
        shutil.copyfile(demo / name, out / name)
    return int(model.num_parameters())


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="Output folder.")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128, help="Hidden size, a multiple of 64.")
    parser.add_argument("--steps", type=int, default=2500, help="Number of optimiser steps.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.layers < 1 or options.steps < 1 or options.hidden < 64 or options.hidden % HEAD_DIM:
        parser.error("--layers and --steps must be at least 1, and --hidden a multiple of 64")
    parameters = run(options.out, options.layers, options.hidden, options.steps, options.seed)
    print(f"{parameters:,} parameters in {options.out}")


if __name__ == "__main__":
    main()
