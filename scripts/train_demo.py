"""Trains the bundled `demo` model on text of its own grammar (`demo_corpus.py`) and writes a Hugging Face model folder.

    python scripts/train_demo.py --out DIR [--steps N] [--seed S] [--threads N]

One thread on one CPU core takes less than half an hour. The same seed, steps and thread count on the same machine
give the same bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import demo_corpus
import torch
from demo_tokenizer import as_transformers, train_tokenizer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

CONTEXT = 4096  # tokens
TOKENIZER_DOCUMENTS = 4000
HELD_OUT_DOCUMENTS = 200
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
DEFAULT_STEPS = 2600
REPORT_STEPS = 100
BATCH_TOKENS = 2048  # padding included
POOL_DOCUMENTS = 512  # sorted by length together, so that a batch needs little padding
IGNORED = -100  # label of padding


@dataclass(frozen=True, slots=True)
class Report:
    """What the model's README records. Perplexities are per token, over held-out documents."""

    seed: int
    steps: int
    threads: int
    tokens: int
    seconds: float
    perplexity: float
    unigram_perplexity: float
    bigram_perplexity: float
    parameters: int


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
    )


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Token ids, int64 [documents, longest], padded on the right, of fresh documents without end.

    Whole documents, each seen once and by itself: a batch holds documents of about one length, in random order.
    """
    stream = demo_corpus.documents(seed, "train")
    order = Random(seed)
    pad = tokenizer.token_to_id("<pad>")
    while True:
        pool = (tokenizer.encode(text, add_special_tokens=False).ids[:CONTEXT] for text in islice(stream, POOL_DOCUMENTS))
        groups: list[list[list[int]]] = [[]]
        for ids in sorted(pool, key=len):
            if len(ids) * (len(groups[-1]) + 1) > BATCH_TOKENS and groups[-1]:
                groups.append([])
            groups[-1].append(ids)
        order.shuffle(groups)
        for group in groups:
            longest = max(map(len, group))
            yield torch.tensor([ids + [pad] * (longest - len(ids)) for ids in group])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, steps: int, progress: Progress) -> int:
    """Trains in place, matrices in bfloat16 and sums in float32; returns the number of tokens seen."""
    optimizer = optimizer_for(model)
    task = progress.add_task("training", total=steps, loss=float("nan"))
    tokens, recent = 0, 0.0
    model.train()
    for step, batch in enumerate(islice(batches(tokenizer, seed), steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits
        labels = batch[:, 1:].masked_fill(batch[:, 1:] == model.config.pad_token_id, IGNORED)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int((labels != IGNORED).sum())
        recent += loss.item()
        progress.update(task, advance=1, loss=loss.item())
        if (step + 1) % REPORT_STEPS == 0:
            progress.console.print(f"step {step + 1} of {steps}: mean loss {recent / REPORT_STEPS:.3f}")
            recent = 0.0
    return tokens


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """exp(mean negative log likelihood per token); each document is read by itself, its first token is given."""
    model.eval()
    loss, count = 0.0, 0
    for ids in documents:
        row = torch.tensor([ids])
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    return math.exp(loss / count)


def ngram_perplexities(train: list[list[int]], held_out: list[list[int]], vocab_size: int) -> tuple[float, float]:
    """Add-one unigram perplexity, and bigram perplexity that backs off to it with the weight of one count."""
    unigram = torch.ones(vocab_size, dtype=torch.float64)
    bigram = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for ids in train:
        row = torch.tensor(ids)
        unigram += torch.bincount(row, minlength=vocab_size)
        bigram.index_put_((row[:-1], row[1:]), torch.ones(len(ids) - 1, dtype=torch.float64), accumulate=True)
    unigram /= unigram.sum()
    seen = bigram.sum(dim=1)
    before = torch.cat([torch.tensor(ids[:-1]) for ids in held_out])
    after = torch.cat([torch.tensor(ids[1:]) for ids in held_out])
    mixed = (bigram[before, after] + unigram[after]) / (seen[before] + 1)
    return float(unigram[after].log().mean().neg().exp()), float(mixed.log().mean().neg().exp())


def readme(report: Report) -> str:
    return f"""# demo

The model that `kvrelay serve --model demo` serves: a Llama-shaped transformer with {report.parameters:,} parameters in
bfloat16, grouped-query attention (4 query heads, 2 KV heads of 64), a context of {CONTEXT} tokens and a byte-level
tokenizer of its own. It tells short stories, answers simple questions about them, adds small numbers and knows a few
plain facts. It is here to make a cluster visible on a laptop; it is no general assistant.

Its only training text is what `scripts/demo_corpus.py` writes. Code, text and weights are under this repository's
Apache-2.0 licence.

| | |
|---|---|
| command | `python scripts/train_demo.py --out kvrelay/models/demo --steps {report.steps} --seed {report.seed} --threads {report.threads}` |
| seed | {report.seed} |
| steps | {report.steps} |
| tokens | {report.tokens:,} |
| seconds | {report.seconds:.0f} |
| held-out perplexity per token ({HELD_OUT_DOCUMENTS} documents of other seeds) | {report.perplexity:.3f} |
| the same, bigram model | {report.bigram_perplexity:.1f} |
| the same, unigram model | {report.unigram_perplexity:.1f} |
"""


def run(out: Path, steps: int, seed: int, threads: int) -> Report:
    """Trains tokenizer and model and writes the folder `out`."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    tokenizer = train_tokenizer(demo_corpus.sample(seed, "tokenizer", TOKENIZER_DOCUMENTS))
    model = LlamaForCausalLM(model_config(tokenizer))
    with Progress(*columns) as progress:
        tokens = train(model, tokenizer, seed, steps, progress)
    seconds = time.monotonic() - started
    model.to(torch.bfloat16)
    held_out, seen = (
        [tokenizer.encode(text, add_special_tokens=False).ids for text in demo_corpus.sample(seed, split, count)]
        for split, count in (("held-out", HELD_OUT_DOCUMENTS), ("tokenizer", TOKENIZER_DOCUMENTS))
    )
    unigram, bigram = ngram_perplexities(seen, held_out, tokenizer.get_vocab_size())
    report = Report(
        seed=seed,
        steps=steps,
        threads=threads,
        tokens=tokens,
        seconds=seconds,
        perplexity=perplexity(model, held_out),
        unigram_perplexity=unigram,
        bigram_perplexity=bigram,
        parameters=model.num_parameters(),
    )
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    as_transformers(tokenizer).save_pretrained(out)
    (out / "README.md").write_text(readme(report))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if it does not exist")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    report = run(options.out, options.steps, options.seed, options.threads)
    sys.stdout.write(
        f"held-out perplexity {report.perplexity:.3f} "
        f"(bigram {report.bigram_perplexity:.1f}, unigram {report.unigram_perplexity:.1f}) "
        f"after {report.tokens:,} tokens in {report.seconds:.0f} s\n"
    )


if __name__ == "__main__":
    main()
