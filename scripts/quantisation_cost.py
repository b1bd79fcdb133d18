"""Measures the quality cost of quantised KV and int8 weights for the bundled demo model.

    python scripts/quantisation_cost.py [--documents N] [--answers N] [--json]

The results are held-out perplexity, teacher-forced top-1 agreement, the share of equal greedy
answers, and of held-out questions about a story that are answered word for word. The held-out
documents are those of the model card. The baseline model completes some of them greedily from the
middle, one at a time. Each variant is compared with these answers in two ways: teacher-forced,
where a difference counts once, and free-running, where a difference changes all later tokens.

The first row is the baseline model in other batches, which shows the effect of rounding alone.

The last rows are of the same model with large key channels: three channels of each key are 16 times
as large, and those of the query a 16th, so that it computes the same. Published models have such
channels (KIVI, Liu et al., 2024, figure 2), and the demo model has none.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import demo_corpus
import torch
from demo_evaluation import first_turns
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from train_demo import HELD_OUT_QUESTIONS, STORY_TOKENS
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models import resolve_model

# Seed of the training of the bundled model.
SEED = 0
DOCUMENTS = 200
ANSWERS = 64
# Most tokens of an answer.
ANSWER_TOKENS = 64
# Answers that a variant generates at once.
BATCH = 16
KV_BYTES = 256 * 2**20

LARGE_CHANNELS = (3, 17, 29)
LARGE_FACTOR = 16.0

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 KV": {"kv_dtype": "int8"},
    "int4 KV": {"kv_dtype": "int4"},
    "int8 weights": {"weights": "int8"},
    "int8 KV and weights": {"kv_dtype": "int8", "weights": "int8"},
    "int4 KV, int8 weights": {"kv_dtype": "int4", "weights": "int8"},
}
WITH_LARGE_KEYS: dict[str, dict[str, Any]] = {
    "bfloat16, large key channels": {},
    "int8 KV, large key channels": {"kv_dtype": "int8"},
    "int4 KV, large key channels": {"kv_dtype": "int4"},
}

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Cost:
    """One variant compared with the baseline. Positions are in tokens from the start of the
    answer.
    """

    variant: str
    weight_bytes: int
    kv_bytes_per_token: float
    perplexity: float
    # Teacher-forced top-1 agreement with the baseline.
    same_tokens: int
    tokens: int
    # Equal free-running answers.
    same_answers: int
    answers: int
    # Over the answers that differ.
    median_first_difference: float | None
    # Questions about a story, and those of them that are answered word for word.
    retrieved: int
    questions: int


def perplexity(runner: ModelRunner, documents: Sequence[Tokens]) -> float:
    """Returns exp(mean negative log likelihood per token). Each document is evaluated
    separately; its first token is given.
    """
    loss, count = 0.0, 0
    for ids in documents:
        logits = runner.forward(
            [Segment(ids, 0, _blocks(runner, 0, len(ids)))], range(len(ids) - 1)
        ).float()
        loss += torch.nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:]), reduction="sum"
        ).item()
        count += len(ids) - 1
    return math.exp(loss / count)


def greedy(
    runner: ModelRunner, prompts: Sequence[Tokens], max_tokens: int, batch: int
) -> list[Tokens]:
    """Returns the greedy answer of each prompt, up to `max_tokens` >= 1. Generates `batch` at
    once.
    """
    answers: list[Tokens] = [[] for _ in prompts]
    longest = max(map(len, prompts)) + max_tokens
    for first in range(0, len(prompts), batch):
        writing = list(range(first, min(first + batch, len(prompts))))
        tables = {i: _blocks(runner, i - first, longest) for i in writing}
        segments = [Segment(prompts[i], 0, tables[i]) for i in writing]
        while writing:
            for i, token in zip(writing, _likeliest_after(runner, segments), strict=True):
                answers[i].append(token)
            writing = [
                i
                for i in writing
                if len(answers[i]) < max_tokens and answers[i][-1] not in runner.eos_token_ids
            ]
            segments = [
                Segment(answers[i][-1:], len(prompts[i]) + len(answers[i]) - 1, tables[i])
                for i in writing
            ]
    return answers


def same_tokens(runner: ModelRunner, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> int:
    """Returns the number of answer tokens that are the most likely after all tokens before them."""
    return sum(
        sum(map(int.__eq__, _likeliest(runner, prompt, answer), answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    )


def retrieved(runner: ModelRunner, questions: Sequence[tuple[Tokens, Tokens]]) -> int:
    """Returns the number of (prompt, answer) whose greedy answer is the given one."""
    return sum(_likeliest(runner, prompt, answer) == answer for prompt, answer in questions)


def first_difference(answer: Tokens, expected: Tokens) -> int | None:
    """Returns the index of the first differing token; None for equal answers. If one answer is a
    prefix of the other, the index is its length.
    """
    if answer == expected:
        return None
    differing = (
        i for i, (ours, theirs) in enumerate(zip(answer, expected, strict=False)) if ours != theirs
    )
    return next(differing, min(len(answer), len(expected)))


def costs(
    model: str,
    variants: dict[str, dict[str, Any]],
    documents: Sequence[Tokens],
    prompts: Sequence[Tokens],
    questions: Sequence[tuple[Tokens, Tokens]],
) -> Iterator[Cost]:
    """Yields the cost of each variant. variants: name to options of ModelRunner.load; the first
    variant is the baseline.
    """
    expected: list[Tokens] = []
    for name, options in variants.items():
        runner = ModelRunner.load(model, kv_bytes=KV_BYTES, **options)
        expected = expected or greedy(runner, prompts, ANSWER_TOKENS, batch=1)
        answers = greedy(runner, prompts, ANSWER_TOKENS, BATCH)
        differences = [first_difference(*pair) for pair in zip(answers, expected, strict=True)]
        positions = [position for position in differences if position is not None]
        yield Cost(
            variant=name,
            weight_bytes=runner.weight_bytes,
            kv_bytes_per_token=runner.layout.block_bytes / runner.layout.block_size,
            perplexity=perplexity(runner, documents),
            same_tokens=same_tokens(runner, prompts, expected),
            tokens=sum(map(len, expected)),
            same_answers=len(answers) - len(positions),
            answers=len(answers),
            median_first_difference=median(positions) if positions else None,
            retrieved=retrieved(runner, questions),
            questions=len(questions),
        )
        runner.close()


def table(results: Sequence[Cost]) -> Table:
    """Returns the results as a table."""
    view = Table()
    columns = (
        "",
        "weights, MB",
        "KV, bytes per token",
        "perplexity",
        "top-1 agreement",
        "equal answers",
        "first difference",
        "about a story",
    )
    for column in columns:
        view.add_column(column, justify="right" if column else "left")
    for one in results:
        view.add_row(
            one.variant,
            f"{one.weight_bytes / 1e6:.2f}",
            f"{one.kv_bytes_per_token:.0f}",
            f"{one.perplexity:.4f}",
            f"{one.same_tokens / one.tokens:.2%} of {one.tokens}",
            f"{one.same_answers} of {one.answers}",
            "none"
            if one.median_first_difference is None
            else f"token {one.median_first_difference:g} (median)",
            f"{one.retrieved} of {one.questions}",
        )
    return view


def _blocks(runner: ModelRunner, place: int, num_tokens: int) -> range:
    """Returns the block table at index `place` among consecutive tables for `num_tokens` tokens."""
    size = runner.layout.blocks_for(num_tokens)
    return range(place * size, (place + 1) * size)


def with_large_keys(model: str, folder: Path) -> str:
    """Writes a copy of the model that has large key channels, and computes the same. Returns its
    path.
    """
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((Path(model) / "config.json").read_text())
    half = config["head_dim"] // 2
    (weights,) = Path(model).glob("*.safetensors")
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        for part, factor in (("q_proj.weight", 1 / LARGE_FACTOR), ("k_proj.weight", LARGE_FACTOR)):
            if name.endswith(part):
                heads = tensor.view(-1, 2, half, tensor.shape[1])
                # Both values of a pair that the position rotates.
                heads[:, :, list(LARGE_CHANNELS)] *= factor
    save_file(tensors, folder / weights.name, {"format": "pt"})
    return str(folder)


def story_questions(tokenizer: Any) -> list[tuple[Tokens, Tokens]]:
    """Returns held-out questions about a story as (prompt, answer)."""
    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "</s>"])
    texts = demo_corpus.sample(SEED, "questions", HELD_OUT_QUESTIONS)
    documents = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    long = (ids for ids in documents if len(ids) > STORY_TOKENS)
    return list(first_turns(long, assistant, end))


def _likeliest(runner: ModelRunner, prompt: Tokens, answer: Tokens) -> Tokens:
    """Returns the most likely token at each position of the answer, after all tokens before it."""
    ids = prompt + answer[:-1]
    blocks, rows = _blocks(runner, 0, len(ids)), range(len(prompt) - 1, len(ids))
    tokens: Tokens = runner.forward([Segment(ids, 0, blocks)], rows).argmax(dim=-1).tolist()
    return tokens


def _likeliest_after(runner: ModelRunner, segments: Sequence[Segment]) -> list[int]:
    rows, end = [], 0
    for segment in segments:
        end += len(segment.token_ids)
        rows.append(end - 1)
    tokens: list[int] = runner.forward(segments, rows).argmax(dim=-1).tolist()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, help="Number of held-out documents."
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=ANSWERS,
        help="Number of these documents that the variants complete.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON array.")
    options = parser.parse_args()
    if not 1 <= options.answers <= options.documents:
        parser.error("--answers must be at least 1 and at most --documents")
    disable_progress_bar()
    torch.set_num_threads(1)
    model = resolve_model("demo")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = demo_corpus.sample(SEED, "held-out", options.documents)
    documents = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    prompts = [ids[: len(ids) // 2] for ids in documents[: options.answers]]
    questions = story_questions(tokenizer)[: options.documents]
    results = list(costs(model, VARIANTS, documents, prompts, questions))
    with tempfile.TemporaryDirectory() as folder:
        large = with_large_keys(model, Path(folder))
        results += costs(large, WITH_LARGE_KEYS, documents, prompts, questions)
    if options.json:
        print(json.dumps([asdict(one) for one in results]))
    else:
        Console(width=120).print(table(results))


if __name__ == "__main__":
    main()
