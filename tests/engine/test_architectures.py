"""Every served architecture against transformers' own `generate` with its eager attention."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_models import SERVED, VOCAB, WINDOW
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from kvrelay.engine.int8 import dequantise, quantise
from kvrelay.engine.runner import ModelRunner, Segment
from kvrelay.engine.sampling import SampleRequest
from kvrelay.types import SamplingParams

BLOCK_SIZES = {"torch": 4, "auto": 16}  # native kernels take multiples of 16
NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 2 * WINDOW + 1, 37, 21)  # in blocks: part of one, whole and a bit, many
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(2, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


def quantised_eager(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kw: Any
) -> Any:
    """The model's own eager attention, over keys and values that have been int8."""
    key, value = (dequantise(*quantise(tensor), tensor.dtype) for tensor in (key, value))
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, *rest, **kw)


AttentionInterface.register("quantised_eager", quantised_eager)
AttentionMaskInterface.register("quantised_eager", eager_mask)


def oracle(folder: Path, prompts: Sequence[Sequence[int]], attention: str = "eager") -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )[0].tolist()
        for prompt in prompts
    ]


class Batch:
    """Sequences that join one by one, prefill in chunks of `chunk` beside each other's decode steps, and never stop.

    Block tables are drawn at random from the whole pool, or are runs.
    """

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[Sequence[int]], *, chunk: int, contiguous: bool, seed: int = 0
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
        return all(len(tokens) == p + NEW_TOKENS for tokens, p in zip(self.tokens, self.prompt_lens, strict=True))

    def step(self) -> None:
        self.joined = min(self.joined + 1, len(self.tokens))
        active = [i for i in range(self.joined) if len(self.tokens[i]) < self.prompt_lens[i] + NEW_TOKENS]
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
            region_start += source.num_blocks * size


@pytest.fixture(scope="module")
def generated(tiny_model: Callable[[str], Path], prompts: list[list[int]]) -> Callable[[str, str], list[list[int]]]:
    """generated(architecture, kv_dtype) -> what transformers makes of the prompts, computed once."""

    @functools.cache
    def answers(architecture: str, kv_dtype: str) -> list[list[int]]:
        return oracle(tiny_model(architecture), prompts, "eager" if kv_dtype == "auto" else "quantised_eager")

    return answers


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", SERVED)
def test_ragged_chunked_fragmented_and_handed_off_equals_generate(
    architecture: str,
    kv_dtype: Literal["auto", "int8"],
    kernels: Literal["auto", "torch"],
    tiny_model: Callable[[str], Path],
    prompts: list[list[int]],
    generated: Callable[[str, str], list[list[int]]],
) -> None:
    expected = generated(architecture, kv_dtype)
    runners = [
        ModelRunner.load(
            str(tiny_model(architecture)),
            block_size=BLOCK_SIZES[kernels],
            kv_bytes=1 << 20,
            kv_dtype=kv_dtype,
            kernels=kernels,
        )
        for _ in range(2)
    ]
    assert {runner.kernels for runner in runners} == {"torch" if kernels == "torch" else "native"}
    assert runners[0].layout_hash == runners[1].layout_hash
    assert len({tuple(tokens[-NEW_TOKENS:]) for tokens in expected}) > 1, "answers that do not depend on the prompt"

    straight = Batch(runners[0], prompts, chunk=64, contiguous=True)
    while not straight.done:
        straight.step()
    assert straight.tokens == expected

    moved = Batch(runners[0], prompts, chunk=7, contiguous=False)
    for _ in range(7):  # some prompts are computed in part, some sequences decode
        moved.step()
    assert 0 < moved.computed[2] < PROMPT_LENGTHS[2]
    assert len(moved.tokens[0]) > PROMPT_LENGTHS[0]
    moved.hand_off(runners[1], seed=1)
    runners[0].kv.buffer.zero_()
    while not moved.done:
        moved.step()
    assert moved.tokens == expected
