"""What int8 KV costs the bundled demo model: held-out perplexity, and greedy tokens that change.

    python scripts/quantisation_cost.py [--documents N] [--answers N] [--json]

The held-out documents are those of the model's card. The second halves of some of them are written
anew, greedily, one at a time, by the model as it is. Then each variant is asked what it would have
written: after each token of that answer (so that a difference counts once), and running free (so
that one difference changes all that comes after).

The first row is the model as it is again, in other batches: what rounding alone changes.
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
from kvrelay.engine.segment import Segment
from kvrelay.models import resolve_model

SEED = 0  # of the bundled model's training
DOCUMENTS = 200
ANSWERS = 64
ANSWER_TOKENS = 64  # at most
BATCH = 16  # answers that a variant writes at a time
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
    """One variant against the first. Where an answer begins to differ is counted in tokens from its
    start.
    """

    variant: str
    weight_bytes: int
    kv_bytes_per_token: float
    perplexity: float
    same_tokens: int  # likeliest after the baseline's own tokens
    tokens: int
    same_answers: int  # running free
    answers: int
    median_first_difference: float | None  # of the answers that differ


def perplexity(runner: ModelRunner, documents: Sequence[Tokens]) -> float:
    """exp(mean negative log likelihood per token); each document is read by itself, its first token
    is given.
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
    """Each prompt's answer up to its end or `max_tokens` >= 1, written `batch` at a time."""
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
    """Tokens of the answers that are the likeliest after all before them."""
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
    """Index of the first token that differs, the shorter's length if it is a beginning of the
    other.
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
    """One for each variant, {name: options of ModelRunner.load}; the first is what all are compared
    with.
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
    view = Table()
    columns = (
        "",
        "weights, MB",
        "KV, bytes a token",
        "perplexity",
        "same tokens",
        "same answers",
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
    """A block table for `num_tokens`, the one at `place` of tables of that size."""
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
        "--documents", type=int, default=DOCUMENTS, help="held-out documents that are read"
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=ANSWERS,
        help="of them, how many are written to their end anew",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")
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
