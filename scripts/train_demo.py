"""Trains the bundled `demo` model on generated text (`demo_corpus.py`) and writes a Hugging Face
model folder.

    python scripts/train_demo.py --out DIR [--steps N] [--seed S] [--threads N]

One thread on one CPU core takes about 45 minutes. The same seed, steps and thread count on
the same machine produce the same bytes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import demo_corpus
import demo_talk
import demo_tools
import torch
from demo_card import Report, readme
from demo_evaluation import ngram_perplexities, perplexity, right_answers
from demo_tokenizer import as_transformers, train_tokenizer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# Tokens.
CONTEXT = 4096
TOKENIZER_DOCUMENTS = 4000
HELD_OUT_DOCUMENTS = 200
# Documents. About half of them begin with a question.
HELD_OUT_QUESTIONS = 400
HELD_OUT_CALLS = 200
# Every conversation about a story is longer.
STORY_TOKENS = 100
PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS = 100
DEFAULT_STEPS = 9000
REPORT_STEPS = 100
# Including padding.
BATCH_TOKENS = 1024
# Documents that are sorted by length together, so that batches need little padding.
POOL_DOCUMENTS = 512
# Faster than torch's fused attention on a CPU for documents of this length.
ATTENTION = "eager"
# Label of padding.
IGNORED = -100


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Returns the configuration of the demo model."""
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
        attn_implementation=ATTENTION,
    )


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Yields token ids, int64 [documents, longest], padded on the right, without end.

    Each document appears once, as a separate row. A batch contains documents of similar length. The
    order of the batches is random.
    """
    stream = demo_corpus.documents(seed, "train")
    order = Random(seed)
    pad = tokenizer.token_to_id("<pad>")
    while True:
        pool = (
            tokenizer.encode(text, add_special_tokens=False).ids[:CONTEXT]
            for text in islice(stream, POOL_DOCUMENTS)
        )
        groups: list[list[list[int]]] = [[]]
        for ids in sorted(pool, key=len):
            if len(ids) * (len(groups[-1]) + 1) > BATCH_TOKENS and groups[-1]:
                groups.append([])
            groups[-1].append(ids)
        order.shuffle(groups)
        for group in groups:
            longest = max(map(len, group))
            yield torch.tensor([ids + [pad] * (longest - len(ids)) for ids in group])


def learning_rate(step: int, steps: int, peak: float = PEAK_LEARNING_RATE) -> float:
    """Returns the learning rate: a linear warm-up, then a cosine down to a tenth of the peak."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Returns AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), fused=True)


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    seed: int,
    steps: int,
    progress: Progress,
    *,
    bfloat16: bool = True,
    peak: float = PEAK_LEARNING_RATE,
) -> int:
    """Trains the model in place, with bfloat16 matrix products, unless they are not wanted, and
    float32 sums. Returns the number of training tokens. peak: the highest learning rate.
    """
    optimizer = optimizer_for(model)
    task = progress.add_task("training", total=steps, loss=float("nan"))
    tokens, recent = 0, 0.0
    model.train()
    for step, batch in enumerate(islice(batches(tokenizer, seed), steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits
        labels = batch[:, 1:].masked_fill(batch[:, 1:] == model.config.pad_token_id, IGNORED)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels.flatten()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int((labels != IGNORED).sum())
        recent += loss.item()
        progress.update(task, advance=1, loss=loss.item())
        if (step + 1) % REPORT_STEPS == 0:
            progress.console.print(
                f"step {step + 1} of {steps}: mean loss {recent / REPORT_STEPS:.3f}"
            )
            recent = 0.0
    return tokens


def progress_bar() -> Progress:
    """Returns a progress bar that shows the loss."""
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        loss,
        TimeRemainingColumn(),
    )


def run(
    out: Path,
    steps: int,
    seed: int,
    threads: int,
    begin_with: Path | None = None,
    peak: float = PEAK_LEARNING_RATE,
) -> Report:
    """Trains the model and the tokenizer, and writes the folder `out`. begin_with: a model's folder
    whose weights and tokenizer the training goes on with.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    started, cpu_started = time.monotonic(), time.process_time()
    texts = demo_corpus.sample(seed, "tokenizer", TOKENIZER_DOCUMENTS)
    if begin_with is None:
        tokenizer = train_tokenizer(texts)
        model = LlamaForCausalLM(model_config(tokenizer))
    else:
        tokenizer = Tokenizer.from_file(str(begin_with / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(
            begin_with, dtype=torch.float32, attn_implementation=ATTENTION
        )
    with progress_bar() as progress:
        tokens = train(model, tokenizer, seed, steps, progress, peak=peak)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    model.to(torch.bfloat16)
    held_out = encoded(tokenizer, demo_corpus.sample(seed, "held-out", HELD_OUT_DOCUMENTS))
    unigram, bigram = ngram_perplexities(
        encoded(tokenizer, texts), held_out, tokenizer.get_vocab_size()
    )
    questions = encoded(tokenizer, demo_corpus.sample(seed, "questions", HELD_OUT_QUESTIONS))
    calls = encoded(tokenizer, demo_tools.calls(seed, "held-out", HELD_OUT_CALLS))
    short = [ids for ids in questions if len(ids) <= STORY_TOKENS]
    long = [ids for ids in questions if len(ids) > STORY_TOKENS]
    marks = tokenizer.token_to_id("<|assistant|>"), tokenizer.token_to_id("</s>")
    report = Report(
        seed=seed,
        steps=steps,
        threads=threads,
        peak=peak,
        went_on=begin_with is not None,
        tokens=tokens,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        parameters=model.num_parameters(),
        held_out_documents=HELD_OUT_DOCUMENTS,
        perplexity=perplexity(model, held_out),
        bigram_perplexity=bigram,
        unigram_perplexity=unigram,
        answers_alone=right_answers(model, short, *marks),
        answers_about_stories=right_answers(model, long, *marks),
        sums=right_answers(model, encoded(tokenizer, demo_talk.small_sums()), *marks),
        calls=right_answers(model, calls, *marks),
    )
    save(model, tokenizer, out)
    (out / "README.md").write_text(readme(report))
    return report


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the token ids of each text."""
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the files that `AutoModelForCausalLM` and `AutoTokenizer` load: configuration,
    weights, tokenizer and chat template.
    """
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        # So small a model is often wrong where it is not sure.
        do_sample=True,
        temperature=0.2,
    )
    model.save_pretrained(out)
    # save_pretrained makes the file readable for its owner only.
    (out / "model.safetensors").chmod(0o644)
    as_transformers(tokenizer).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="Output folder; created if it does not exist."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help="Number of optimiser steps, of about 950 tokens each.",
    )
    parser.add_argument(
        "--begin-with",
        type=Path,
        metavar="FOLDER",
        help="Go on with the weights and the tokenizer of a model's folder.",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=PEAK_LEARNING_RATE, help="The highest one."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; give a folder")
    report = run(
        options.out,
        options.steps,
        options.seed,
        options.threads,
        options.begin_with,
        options.learning_rate,
    )
    print(
        f"held-out perplexity {report.perplexity:.3f} "
        f"(bigram {report.bigram_perplexity:.2f}, unigram {report.unigram_perplexity:.1f}) "
        f"after {report.tokens:,} tokens in {report.seconds:.0f} s; "
        f"{report.answers_alone[0]} of {report.answers_alone[1]} held-out questions and "
        f"{report.answers_about_stories[0]} of {report.answers_about_stories[1]} about a story "
        f"answered word for word"
    )


if __name__ == "__main__":
    main()
