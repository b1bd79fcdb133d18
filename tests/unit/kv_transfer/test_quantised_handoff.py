"""Quantised KV from one worker's memory to another's: the same bytes, so the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.transfer_ends import KEY, MemoryFile, decode_end, sender_of

from kv_transfer.blocks.arena import digests_of
from kv_transfer.blocks.plan import Layers
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment

PROMPT = [2 + 7 * i % 100 for i in range(45)]
# Blocks of four tokens, for prompt and answer
SOURCES = [3, 11, 4, 5, 17, 9, 8, 20, 0, 1, 2, 30, 29, 6, 7]
TARGETS = [12, 2, 3, 4, 31, 0, 7, 6, 5, 21, 22, 23, 1, 19, 18]
NEW_TOKENS = 12


@pytest.fixture(
    params=[
        (model, kv_dtype) for model in ("llama", "deepseek_v3") for kv_dtype in ("int8", "int4")
    ],
    ids=str,
)
def runner(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]
) -> Callable[[], ModelRunner]:
    model, kv_dtype = request.param

    def load() -> ModelRunner:
        folder = str(tiny_model(model))
        return ModelRunner.load(
            folder, block_size=4, kv_dtype=kv_dtype, kv_bytes=2**16, max_model_len=64
        )

    return load


def likeliest(runner: ModelRunner, segment: Segment) -> int:
    return int(runner.forward([segment], [len(segment.token_ids) - 1]).argmax())


def continuation(runner: ModelRunner, first: int, blocks: list[int]) -> list[int]:
    """Greedy, after the prompt and its first new token."""
    tokens = [first]
    for _ in range(NEW_TOKENS):
        tokens.append(
            likeliest(runner, Segment(tokens[-1:], len(PROMPT) + len(tokens) - 1, blocks))
        )
    return tokens


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_what_was_handed_off_goes_on_as_it_would_have_at_home(
    transport: str, runner: Callable[[], ModelRunner]
) -> None:
    prefill, decode = runner(), runner()
    likeliest(prefill, Segment(PROMPT[:20], 0, SOURCES))
    first = likeliest(prefill, Segment(PROMPT[20:], 20, SOURCES))
    used = prefill.layout.blocks_for(len(PROMPT))
    source = prefill.kv.buffer.clone()
    async with (
        decode_end(decode.layout, decode.num_blocks) as end,
        sender_of(prefill.kv) as sender,  # type: ignore[arg-type]
    ):
        push = sender.open(KEY, end.grant(TARGETS[:used], transport=transport))
        push.send(0, SOURCES[:5])
        push.send(5, SOURCES[5:used])
        handoff = await push.commit(first, len(PROMPT), 0.0)
        assert (handoff.transport, handoff.bytes) == (transport, used * decode.layout.block_bytes)
        sent = MemoryFile(prefill.layout, prefill.num_blocks)
        sent.buffer.copy_(source)
        assert [end.arena.block(n) for n in TARGETS[:used]] == [
            sent.block(n) for n in SOURCES[:used]
        ]
        decode.kv.buffer.copy_(end.arena.buffer)
    assert torch.equal(prefill.kv.buffer, source)
    at_home = continuation(prefill, first, SOURCES)
    assert len(set(at_home)) > 3
    assert continuation(decode, first, TARGETS) == at_home


def test_a_blocks_digest_is_of_its_values_and_of_its_scales(
    runner: Callable[[], ModelRunner],
) -> None:
    prefill = runner()
    likeliest(prefill, Segment(PROMPT, 0, SOURCES))
    block, other = SOURCES[:2]
    layers = Layers(0, len(prefill.layout.layers))
    digests = {digests_of(prefill.kv, [block], layers)}
    for layer in prefill.kv.layers:
        for region in layer.regions:
            region.view(torch.uint8)[other] += 1
            assert digests_of(prefill.kv, [block], layers) in digests
            region.view(torch.uint8)[block] += 1
            digests.add(digests_of(prefill.kv, [block], layers))
    assert len(digests) == 1 + len(prefill.layout.regions)
