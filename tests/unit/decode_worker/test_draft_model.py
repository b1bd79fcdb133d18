"""The draft model's KV, against a memory that knows which token each place holds."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.draft_model import CATCH_UP_TOKENS, DraftLimits, DraftModelProposer
from decode_worker.draft_passes import DraftRequest
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

BLOCK = 4
# The tokens of a sequence are its number times this, plus 0 or 1.
EACH = 10


def made(number: int, length: int) -> Sequence:
    tokens = tuple(number * EACH + index % 2 for index in range(length))
    spec = SequenceSpec(str(number), 0, tokens, length, SamplingParams())
    return Sequence(spec, 0.0, BlockHasher(BLOCK))


def done(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that never suspends."""
    with suppress(StopIteration):
        coroutine.send(None)


class Memory:
    """A draft model whose KV is the token itself. It drafts 0 and 1 as the test says."""

    def __init__(self, limits: DraftLimits, data: st.DataObject) -> None:
        self._limits, self._data = limits, data
        self._cells: dict[int, int] = {}
        self.sequences: dict[int, Sequence] = {}
        # The sequence that ends while the passes run, and whether they fail.
        self.ends: int | None = None
        self.fails = False
        self.broken: AssertionError | None = None
        self.proposer = DraftModelProposer(limits, self.run)

    async def run(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        try:
            return self._run(requests)
        except AssertionError as error:
            # The proposer takes every exception for a failure of the draft model.
            self.broken = error
            raise

    def _run(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        owners: set[int] = set()
        drafts = []
        for one in requests:
            assert not owners.intersection(one.blocks), "a block of two sequences"
            owners.update(one.blocks)
            number = one.token_ids[0] // EACH
            tokens = self.sequences[number].tokens
            past = [self._cells.get(self._place(one, index)) for index in range(one.start)]
            assert past == list(tokens[: one.start]), "the KV before the new tokens"
            assert list(one.token_ids) == list(tokens[one.start :][: len(one.token_ids)])
            end = one.start + len(one.token_ids)
            assert one.depth == 0 or end == len(tokens)
            assert end + max(0, one.depth - 1) <= self._limits.max_model_len
            bits = self._data.draw(st.lists(st.integers(0, 1), min_size=8, max_size=8))
            draft = tuple(number * EACH + bit for bit in bits[: one.depth])
            for index, token in enumerate((*one.token_ids, *draft[:-1]), one.start):
                self._cells[self._place(one, index)] = token
            drafts.append(draft)
        assert sum(n for one in requests if (n := len(one.token_ids)) > 9) <= CATCH_UP_TOKENS
        if self.ends is not None:
            self.end(self.ends)
        if self.fails:
            raise RuntimeError("the draft model fails")
        return drafts

    def _place(self, one: DraftRequest, index: int) -> int:
        return one.blocks[index // BLOCK] * BLOCK + index % BLOCK

    def end(self, number: int) -> None:
        self.proposer.forget(self.sequences.pop(number))


@given(st.data())
def test_the_kv_is_that_of_the_tokens_whatever_is_accepted(data: st.DataObject) -> None:
    limits = DraftLimits(data.draw(st.integers(20, 60), label="blocks"), BLOCK, 80, tokens=8)
    memory = Memory(limits, data)
    proposer = memory.proposer
    numbers = iter(range(1, 1000))
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        if len(memory.sequences) < 4 and data.draw(st.booleans(), label="comes"):
            number = next(numbers)
            memory.sequences[number] = made(number, data.draw(st.integers(1, 85), label="prompt"))
        running = [one for one in memory.sequences.values() if data.draw(st.booleans())]
        wanted = [(one, data.draw(st.integers(1, 8), label="depth")) for one in running]
        chosen = st.none() | st.sampled_from(sorted(memory.sequences) or [0])
        ends = data.draw(chosen, label="ends")
        memory.ends = ends if ends in memory.sequences else None
        memory.fails = data.draw(st.integers(0, 9), label="fails") == 0
        done(proposer.prepare(wanted))
        if memory.broken is not None:
            raise memory.broken
        if memory.ends in memory.sequences:
            # There were no passes in which it could end.
            memory.end(memory.ends)  # type: ignore[arg-type]
        proposer.check_integrity(len(memory.sequences))
        assert proposer.blocks_held <= limits.num_blocks
        depths = dict(wanted)
        for one in memory.sequences.values():
            limit = data.draw(st.integers(1, 8), label="limit")
            draft = proposer.propose(one, limit)
            assert len(draft) <= min(limit, depths.get(one, 0))
            # The step accepts a part of the draft, and adds a token.
            right = data.draw(st.integers(0, len(draft)), label="right")
            number = one.tokens[0] // EACH
            one.tokens.extend(draft[:right])
            one.tokens.append(number * EACH + data.draw(st.integers(0, 1), label="token"))
            assert proposer.propose(one, limit) == ()
    for number in list(memory.sequences):
        memory.end(number)
    assert proposer.blocks_held == 0
    proposer.check_integrity(0)


def test_blocks_are_taken_from_sequences_that_do_not_run() -> None:
    first, second = made(1, 20), made(2, 20)

    async def run(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        return [(7,) * one.depth for one in requests]

    proposer = DraftModelProposer(DraftLimits(6, BLOCK, 40, tokens=4), run)
    done(proposer.prepare([(first, 2)]))
    assert proposer.propose(first, 4) == (7, 7)
    done(proposer.prepare([(second, 2)]))
    assert (proposer.propose(first, 4), proposer.propose(second, 4)) == ((), (7, 7))
    # There is no room for both: the second one is not drafted for, and never again.
    done(proposer.prepare([(first, 2), (second, 2)]))
    assert [bool(proposer.propose(one, 4)) for one in (first, second)].count(True) == 1
    proposer.forget(first)
    proposer.forget(second)
    assert proposer.blocks_held == 0


def test_kept_kv_of_an_ended_sequence_is_found() -> None:
    async def run(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        return [(7,) * one.depth for one in requests]

    proposer = DraftModelProposer(DraftLimits(6, BLOCK, 40, tokens=4), run)
    done(proposer.prepare([(made(1, 5), 2)]))
    with pytest.raises(IntegrityError, match="1 sequences, of 0 in the batch"):
        proposer.check_integrity(0)
