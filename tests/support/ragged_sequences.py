"""Sequences that a runner computes together, as workers batch them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.tiny_models import VOCAB, WINDOW

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams

NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 2 * WINDOW + 1, 37, 21)  # in blocks of 4: part of one, whole and a bit, many
GREEDY = SamplingParams(temperature=0)


def random_prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(2, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


class RaggedSequences:
    """Sequences that join one by one, prefill in chunks of `chunk` beside each other's decode
    steps, and never stop.

    Block tables are drawn at random from the whole pool, or are runs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int,
        contiguous: bool,
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.chunk = chunk
        self.prompt_lens = [len(prompt) for prompt in prompts]
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.tables = self.new_tables(contiguous, seed)
        self.joined = 0

    def new_tables(self, contiguous: bool, seed: int) -> list[list[int]]:
        blocks = list(range(self.runner.num_blocks))
        if not contiguous:
            random.Random(seed).shuffle(blocks)
        need = [self.runner.layout.blocks_for(length + NEW_TOKENS) for length in self.prompt_lens]
        return [[blocks.pop(0) for _ in range(n)] for n in need]

    @property
    def done(self) -> bool:
        return all(
            len(tokens) == p + NEW_TOKENS
            for tokens, p in zip(self.tokens, self.prompt_lens, strict=True)
        )

    def step(self) -> None:
        self.joined = min(self.joined + 1, len(self.tokens))
        active = [
            i for i in range(self.joined) if len(self.tokens[i]) < self.prompt_lens[i] + NEW_TOKENS
        ]
        segments = []
        for i in active:
            new = self.tokens[i][self.computed[i] : self.computed[i] + self.chunk]
            last = self.computed[i] + len(new) == len(self.tokens[i])
            request = SampleRequest(GREEDY, self.tokens[i], self.prompt_lens[i]) if last else None
            segments.append(Segment(new, self.computed[i], self.tables[i], request))
        for i, segment, sampled in zip(active, segments, self.runner.run(segments), strict=True):
            self.computed[i] += len(segment.token_ids)
            assert len(sampled) == (segment.sample is not None)
            self.tokens[i] += [one.token_id for one in sampled]

    def hand_off(self, runner: ModelRunner, seed: int) -> None:
        """Moves all KV into other blocks of another runner, block by block, as bytes."""
        source, self.runner = self.runner, runner
        old_tables, self.tables = self.tables, self.new_tables(contiguous=False, seed=seed)
        region_start = 0
        for size in source.layout.region_block_bytes:
            for old_table, new_table in zip(old_tables, self.tables, strict=True):
                for old, new in zip(old_table, new_table, strict=True):
                    at, to = region_start + old * size, region_start + new * size
                    runner.kv.buffer[to : to + size] = source.kv.buffer[at : at + size]
            region_start += source.kv.num_blocks * size
