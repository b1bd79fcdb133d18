"""Sequences of given tokens that drop tokens of their KV, as a decode worker runs them."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from decode_worker.token_budget import TokenBudget
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.evictor import Overfull
from kvrelay.engine.token_eviction.recent_queries import WINDOW, RecentQueries
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

CHUNK = 256


@dataclass(slots=True)
class Spent:
    """Seconds since the start."""

    steps: float = 0.0
    scores: float = 0.0
    moves: float = 0.0
    evictions: int = 0
    rows_moved: int = 0


@dataclass(slots=True)
class EvictingBatch:
    """Sequences on one runner. All are answers to a prompt of one token. Budget None drops
    nothing.
    """

    runner: ModelRunner
    budget: TokenBudget | None
    cache: KvCache
    sequences: list[Sequence] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    # The most blocks that the sequences have held.
    most_blocks: int = 0

    @classmethod
    def of(cls, runner: ModelRunner, budget_tokens: int | None) -> EvictingBatch:
        size = runner.layout.block_size
        budget = None
        if budget_tokens is not None:
            assert runner.evictor is not None
            budget = TokenBudget(budget_tokens, size, WINDOW if runner.evictor.needs_queries else 0)
        return cls(runner, budget, KvCache(runner.num_blocks, size, prefix_cache=False))

    def add(self, tokens: SequenceOf[int]) -> Sequence:
        """A sequence of these tokens, of which none is computed."""
        spec = SequenceSpec("", 0, tuple(tokens), 1, SamplingParams())
        sequence = Sequence(spec, 0.0, self.cache.hasher(""))
        self.sequences.append(sequence)
        return sequence

    def compute(self, sequence: Sequence, end: int) -> torch.Tensor:
        """Computes the tokens before `end` that have no KV. Returns their logits."""
        logits = []
        while sequence.num_computed < end:
            start = sequence.num_computed
            stop = min(end, start + CHUNK)
            if self.budget is not None:
                stop = min(stop, self.budget.step_end(sequence))
            logits.append(self._step([sequence], stop - start))
        return torch.cat(logits)

    def decode(self, steps: int) -> None:
        """Computes the next token of every sequence, `steps` times."""
        for _ in range(steps):
            self._step(self.sequences, 1)

    @property
    def blocks_held(self) -> int:
        """Blocks of all sequences."""
        return sum(len(one.blocks) for one in self.sequences)

    def _step(self, sequences: SequenceOf[Sequence], count: int) -> torch.Tensor:
        began = time.perf_counter()
        segments = []
        for one in sequences:
            one.take_blocks(self.cache, one.num_computed + count)
            if one.queries is not None:
                one.queries.begin(one.num_computed)
            new = one.tokens[one.num_computed : one.num_computed + count]
            segments.append(
                Segment(
                    new,
                    one.num_computed,
                    one.blocks,
                    dropped=one.num_dropped,
                    queries=one.queries,
                )
            )
        self.most_blocks = max(self.most_blocks, self.blocks_held)
        logits = self.runner.forward(segments, range(count * len(segments))).clone()
        for one in sequences:
            one.advance(self.cache, count)
        self.spent.steps += time.perf_counter() - began
        for one in sequences:
            self._keep(one)
        return logits

    def _keep(self, sequence: Sequence) -> None:
        budget = self.budget
        if budget is None:
            return
        if budget.is_due(sequence):
            self._evict(sequence, budget)
        if sequence.queries is None and budget.needs_queries(sequence):
            sequence.queries = RecentQueries(sequence.num_computed)

    def _evict(self, sequence: Sequence, budget: TokenBudget) -> None:
        evictor = self.runner.evictor
        assert evictor is not None
        began = time.perf_counter()
        over = budget.blocks_over(sequence)
        plan = evictor.plan(
            Overfull(sequence.blocks, sequence.positions, over, frozenset(), sequence.queries)
        )
        scored = time.perf_counter()
        evictor.move(sequence.blocks, plan)
        kept = [sequence.blocks[place] for place in plan.places]
        gone = [block for block in sequence.blocks if block not in set(kept)]
        sequence.compacted(kept, plan.rows)
        self.cache.release(gone)
        ended = time.perf_counter()
        self.spent.scores += scored - began
        self.spent.moves += ended - scored
        self.spent.evictions += 1
        self.spent.rows_moved += len(plan.moves)
