"""Measures the quality cost of int8 KV and int8 weights for the bundled demo model.

    python scripts/quantisation_cost.py [--documents N] [--answers N] [--json]

The results are held-out perplexity, teacher-forced top-1 agreement, and the share of equal greedy
answers. The held-out documents are those of the model card. The baseline model completes some of
them greedily from the middle, one at a time. Each variant is compared with these answers in two
ways: teacher-forced, where a difference counts once, and free-running, where a difference changes
all later tokens.

The first row is the baseline model in other batches, which shows the effect of rounding alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import demo_corpus
import torch
from rich.console import Console
from rich.table import Table
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

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 KV": {"kv_dtype": "int8"},
    "int8 weights": {"weights": "int8"},
    "int8 KV and weights": {"kv_dtype": "int8", "weights": "int8"},
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
    same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer[:-1]
        rows = range(len(prompt) - 1, len(ids))
        likeliest = (
            runner.forward([Segment(ids, 0, _blocks(runner, 0, len(ids)))], rows)
            .argmax(dim=-1)
            .tolist()
        )
        same += sum(map(int.__eq__, likeliest, answer))
    return same


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
        )
    return view


def _blocks(runner: ModelRunner, place: int, num_tokens: int) -> range:
    """Returns the block table at index `place` among consecutive tables for `num_tokens` tokens."""
    size = runner.layout.blocks_for(num_tokens)
    return range(place * size, (place + 1) * size)


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
    results = list(costs(model, VARIANTS, documents, prompts))
    if options.json:
        print(json.dumps([asdict(one) for one in results]))
    else:
        Console().print(table(results))


if __name__ == "__main__":
    main()
