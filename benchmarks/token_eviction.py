"""What eviction inside sequences saves and costs.

    python benchmarks/token_eviction.py recall FOLDER [--json]
    python benchmarks/token_eviction.py speed [--batch N] [--context N] [--json]

recall: the share of right answers of the model of `recall_model.py` in FOLDER, on questions in the
second half of texts, with the KV of all tokens, of half of them and of a quarter.

speed: decode steps of a model of shape m200 with random weights on one core, at a context with the
KV of all tokens, and with a budget of a tenth. The last columns are the shares of the time that
evictions take: choosing the tokens, and compacting. Run it on quiet cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from evicting_batch import EvictingBatch, Spent
from recall_model import LENGTH, Text, text
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from kvrelay.bench.shapes import random_model
from kvrelay.engine.attention import paged_attention
from kvrelay.engine.model.loader import loaded_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.machine import processor_name
from kvrelay.types.kv_layout import LayerKv
from kvrelay.types.token_eviction import EvictionMethod

METHODS: tuple[EvictionMethod, ...] = get_args(EvictionMethod)
TEXTS = 48
FACTS, QUESTIONS = 0.06, 0.05
SHAPE = "m200"
FULL_STEPS = 16
# Intervals between evictions that are measured.
INTERVALS = 4


@dataclass(frozen=True, slots=True)
class Recall:
    """The answers with one method and budget."""

    method: EvictionMethod | None
    budget_tokens: int | None
    right: int
    questions: int
    most_blocks: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode steps with one method."""

    method: EvictionMethod | None
    budget_tokens: int | None
    step_ms: float
    blocks: int
    share_of_scores: float
    share_of_moves: float
    rows_moved: float


def recall(folder: Path) -> Iterator[Recall]:
    """Yields one result for each method and budget."""
    draw = random.Random(7)
    texts = [text(draw, LENGTH, FACTS, QUESTIONS) for _ in range(TEXTS)]
    for budget in (None, LENGTH // 2, LENGTH // 4):
        for method in (None,) if budget is None else METHODS:
            runner = ModelRunner.load(
                str(folder), block_size=16, kv_bytes=64 * 2**20, eviction=method
            )
            results = [_answered(runner, one, budget) for one in texts]
            runner.close()
            right, questions, blocks = zip(*results, strict=True)
            yield Recall(method, budget, sum(right), sum(questions), max(blocks))


def _answered(runner: ModelRunner, one: Text, budget: int | None) -> tuple[int, int, int]:
    """Right answers, questions and most blocks of a text."""
    batch = EvictingBatch.of(runner, budget)
    sequence = batch.add(one.tokens)
    found = batch.compute(sequence, len(one.tokens)).argmax(dim=-1).tolist()
    asked = [place for place in one.answers if place >= len(one.tokens) // 2]
    right = sum(found[place - 1] == one.tokens[place] for place in asked)
    return right, len(asked), batch.most_blocks


def speed(batch_size: int, context: int) -> Iterator[Speed]:
    """Yields one result for each method, the first without eviction."""
    model = random_model(SHAPE, "cpu", attn_implementation=paged_attention.NAME)
    loaded = loaded_model(model, SHAPE, SHAPE)
    budget = context // 10
    for method in (None, *METHODS):
        runner = ModelRunner.of(
            replace(loaded, model=copy.deepcopy(model)),
            kv_bytes=batch_size * (context + 64) * _token_bytes(loaded.kv_layers),
            eviction=method,
        )
        yield _measured(runner, method, budget, batch_size, context)
        runner.close()


def _measured(
    runner: ModelRunner, method: EvictionMethod | None, budget: int, batch_size: int, context: int
) -> Speed:
    draw = random.Random(0)
    batch = EvictingBatch.of(runner, None if method is None else budget)
    begin = context - FULL_STEPS - 8 if method is None else budget - 20
    steps = FULL_STEPS if method is None else INTERVALS * budget // 8
    for _ in range(batch_size):
        sequence = batch.add([draw.randrange(runner.vocab_size) for _ in range(context)])
        sequence.take_blocks(batch.cache, begin)
        sequence.num_computed = begin
    batch.decode(4)
    batch.spent = Spent()
    began = time.perf_counter()
    batch.decode(steps)
    seconds = time.perf_counter() - began
    spent = batch.spent
    return Speed(
        method,
        None if method is None else budget,
        1000 * seconds / steps,
        batch.blocks_held,
        spent.scores / seconds,
        spent.moves / seconds,
        spent.rows_moved / max(1, spent.evictions),
    )


def _token_bytes(layers: Sequence[LayerKv]) -> int:
    """In bfloat16."""
    return sum(2 * one.kv_heads * sum(one.stored_dims) for one in layers)


def recall_table(results: list[Recall]) -> Table:
    """Returns the results as a table."""
    table = Table(title=f"{TEXTS} texts of {LENGTH} tokens; {processor_name()}")
    for column in ("method", "budget, tokens", "right answers", "most blocks"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for one in results:
        table.add_row(
            one.method or "all tokens",
            str(one.budget_tokens or ""),
            f"{one.right / one.questions:.1%} of {one.questions}",
            str(one.most_blocks),
        )
    return table


def speed_table(results: list[Speed], batch_size: int, context: int) -> Table:
    """Returns the results as a table."""
    title = f"{SHAPE}, {batch_size} sequences, context {context}, one core; {processor_name()}"
    table = Table(title=title)
    for column in ("method", "ms per step", "faster", "blocks", "choosing", "compacting", "rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    full = results[0]
    for one in results:
        table.add_row(
            one.method or "all tokens",
            f"{one.step_ms:.1f}",
            f"{full.step_ms / one.step_ms:.2f}x",
            f"{one.blocks} ({one.blocks / full.blocks:.3f}x)",
            f"{one.share_of_scores:.1%}",
            f"{one.share_of_moves:.1%}",
            f"{one.rows_moved:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_recall = kinds.add_parser("recall", help="Right answers of a model of recall_model.py.")
    of_recall.add_argument("folder", type=Path)
    of_speed = kinds.add_parser("speed", help="Decode steps with and without eviction.")
    of_speed.add_argument("--batch", type=int, default=16, help="Sequences.")
    of_speed.add_argument("--context", type=int, default=8000, help="Tokens of each sequence.")
    for one in (of_recall, of_speed):
        one.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    if options.kind == "recall":
        answers = list(recall(options.folder))
        table = recall_table(answers)
        found = [asdict(one) for one in answers]
    else:
        steps = list(speed(options.batch, options.context))
        table = speed_table(steps, options.batch, options.context)
        found = [asdict(one) for one in steps]
    if options.json:
        print(json.dumps(found))
    else:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
