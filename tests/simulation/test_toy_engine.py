"""The toy engine tells each wrong byte of KV."""

from __future__ import annotations

import random
from typing import Any

import pytest
from simulation.toy_engine import BLOCK, LAYOUT, ToyRunner, answer

from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams

PROMPT = tuple(range(1, 11))
SAMPLING = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
BLOCKS = [6, 2, 9, 4, 7]


def runner() -> ToyRunner:
    return ToyRunner(12, 1, lambda: None)


def generate(toy: ToyRunner, chunks: list[int], spoil: Any = None) -> tuple[int, ...]:
    """The prompt in such chunks, then token by token. `spoil` is called before the last token is
    decoded.
    """
    tokens, start = list(PROMPT), 0
    for count in chunks:
        end = start + count
        sample = SampleRequest(SAMPLING, tokens, len(PROMPT)) if end == len(PROMPT) else None
        (sampled,) = toy.run([Segment(tokens[start:end], start, BLOCKS, sample)])
        start = end
    tokens += [one.token_id for one in sampled]
    while len(tokens) < len(PROMPT) + SAMPLING.max_tokens:
        if spoil is not None and len(tokens) == len(PROMPT) + SAMPLING.max_tokens - 1:
            spoil()
        sample = SampleRequest(SAMPLING, tokens, len(PROMPT))
        (sampled,) = toy.run([Segment(tokens[-1:], len(tokens) - 1, BLOCKS, sample)])
        tokens.append(sampled[0].token_id)
    return tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize("chunks", [[10], [4, 4, 2], [8, 2], [1] * 10])
def test_the_answer_does_not_depend_on_chunks_or_blocks(chunks: list[int]) -> None:
    assert generate(runner(), chunks) == answer(PROMPT, SAMPLING)


def test_each_byte_of_the_sequence_counts_and_no_other() -> None:
    rng = random.Random(0)
    seen = 0
    for _ in range(300):
        toy = runner()
        byte, bit = rng.randrange(len(toy.kv.buffer)), 1 << rng.randrange(8)

        def spoil(toy: ToyRunner = toy, byte: int = byte, bit: int = bit) -> None:
            toy.kv.buffer[byte] ^= bit

        region, offset = byte, 0
        for size in LAYOUT.region_block_bytes:
            if region < size * toy.num_blocks:
                offset = region // (size // BLOCK)  # the slot
                break
            region -= size * toy.num_blocks
        block, place = divmod(offset, BLOCK)
        position = BLOCKS.index(block) * BLOCK + place if block in BLOCKS else 999
        read = position < len(PROMPT) + SAMPLING.max_tokens - 2
        seen += read
        changed = generate(toy, [10], spoil)[-1] != answer(PROMPT, SAMPLING)[-1]
        # A changed state draws the same token one time in 39.
        assert not changed or read, f"byte {byte} is not of the sequence"
        seen -= changed
    assert seen <= 20, "changes of KV that did not change the token"
