"""The drafter asks its proposer for what can still count, and learns from what came."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.drafter import Drafter
from kvrelay.config.pools import SpeculationConfig
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

MAX_MODEL_LEN = 60
MAX_TOKENS = 40


class Guessing:
    """A proposer that is right with some probability."""

    def __init__(self, answer: list[int], likely: float, draw: random.Random) -> None:
        self._answer, self._likely, self._draw = answer, likely, draw
        self.wanted: list[tuple[Sequence, int]] = []
        self.forgotten: list[Sequence] = []

    async def prepare(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        self.wanted = list(wanted)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        assert limit > 0
        right = self._answer[len(sequence.tokens) :][:limit]
        return tuple(one if self._draw.random() < self._likely else -1 for one in right)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def check_integrity(self, sequences: int) -> None:
        return


@given(st.floats(0, 1), st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**32))
def test_each_draft_fits_and_counts_as_it_came(
    likely: float, tokens: int, prompt_len: int, seed: int
) -> None:
    draw = random.Random(seed)
    answer = [draw.randrange(5) for _ in range(MAX_MODEL_LEN)]
    proposer = Guessing(answer, likely, draw)
    drafter = Drafter(SpeculationConfig(tokens=tokens), MAX_MODEL_LEN, proposer)
    spec = SequenceSpec(
        "a", 0, tuple(answer[:prompt_len]), prompt_len, SamplingParams(max_tokens=MAX_TOKENS)
    )
    sequence = Sequence(spec, 0.0, BlockHasher(4))
    while sequence.num_emitted < MAX_TOKENS and len(sequence.tokens) < MAX_MODEL_LEN:
        coroutine = drafter.prepare([sequence])
        with suppress(StopIteration):
            coroutine.send(None)
        limits = [limit for _, limit in proposer.wanted]
        draft = drafter.draft(sequence, room := draw.randrange(9))
        assert len(draft) <= min(room, *(limits or [0]))
        assert sequence.num_emitted + len(draft) < MAX_TOKENS
        assert len(sequence.tokens) + len(draft) < MAX_MODEL_LEN
        right = 0
        while right < len(draft) and draft[right] == answer[len(sequence.tokens) + right]:
            right += 1
        sequence.tokens.extend(answer[len(sequence.tokens) :][: right + 1])
    drafter.forget(sequence)
    assert proposer.forgotten == [sequence]


def test_what_is_always_wrong_is_seldom_drafted() -> None:
    answer = [index % 7 for index in range(2000)]
    proposer = Guessing(answer, 0.0, random.Random(0))
    drafter = Drafter(SpeculationConfig(tokens=4), 2000, proposer)
    spec = SequenceSpec("a", 0, (0,), 1, SamplingParams(max_tokens=2000))
    sequence = Sequence(spec, 0.0, BlockHasher(4))
    drafted = 0
    for token in answer[1:]:
        drafted += len(drafter.draft(sequence, 100))
        sequence.tokens.append(token)
    assert drafted < 60
