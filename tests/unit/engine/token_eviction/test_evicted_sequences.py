"""A sequence whose tokens are dropped computes what transformers computes with these tokens masked,
for every method, kernel and KV dtype.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import pytest
import tokenizers
import torch
from support.tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.evictor import RECENT, Overfull
from kvrelay.engine.token_eviction.recent_queries import WINDOW, RecentQueries
from kvrelay.errors import ConfigError
from kvrelay.types.token_eviction import EvictionMethod

METHODS = get_args(EvictionMethod)
LENGTH = 150
PROMPT = 70
BUDGET = 96
SIZE = 16
TOLERANCE = {"auto": 2e-4, "int8": 0.1}


class Evicted:
    """A sequence of given tokens, which drops some whenever it has BUDGET tokens of KV."""

    def __init__(self, runner: ModelRunner, tokens: Sequence[int], fixed: Sequence[int]) -> None:
        self.runner = runner
        self.tokens = tokens
        self.fixed = fixed
        # In an order that is none, as after some time of service.
        self.free = list(range(runner.num_blocks))
        random.Random(3).shuffle(self.free)
        self.blocks: list[int] = []
        self.positions: list[int] = []
        self.queries: RecentQueries | None = None
        self.logits: list[torch.Tensor] = []
        # The position before which each token was dropped.
        self.gone: dict[int, int] = {}
        self.moved = 0

    def run(self) -> None:
        self.step(PROMPT)
        while self.at < len(self.tokens):
            self.step(1)
            if len(self.positions) >= BUDGET:
                self.evict()

    @property
    def at(self) -> int:
        return len(self.positions) + len(self.gone)

    def step(self, count: int) -> None:
        start = self.at
        if len(self.positions) == BUDGET - WINDOW:
            self.queries = RecentQueries(start)
        if self.queries is not None:
            self.queries.begin(start)
        self.positions += range(start, start + count)
        while len(self.blocks) * SIZE < len(self.positions):
            self.blocks.append(self.free.pop())
        new = self.tokens[start : start + count]
        dropped = len(self.gone)
        segment = Segment(new, start, self.blocks, dropped=dropped, queries=self.queries)
        self.logits.append(self.runner.forward([segment], range(count)).clone())

    def evict(self) -> None:
        evictor, at = self.runner.evictor, self.at
        assert evictor is not None
        fixed = frozenset(place for place, block in enumerate(self.blocks) if block in self.fixed)
        plan = evictor.plan(Overfull(self.blocks, self.positions, 2, fixed, self.queries))
        everything = [*self.blocks, *(self.free.pop() for _ in range(plan.num_spare))]
        before = {block: self.memory(block) for block in self.fixed}
        evictor.move(everything, plan)
        for block, bytes_before in before.items():
            assert torch.equal(self.memory(block), bytes_before), "others read this block"
        kept = [self.positions[row] for row in plan.rows]
        self.gone |= dict.fromkeys(set(self.positions) - set(kept), at)
        self.blocks = [everything[place] for place in plan.places]
        assert len(self.blocks) == -(-len(kept) // SIZE)
        self.free = [block for block in everything if block not in self.blocks] + self.free
        assert set(range(SIZE)) | set(range(at - RECENT, at)) <= set(kept)
        self.positions = kept
        self.moved += len(plan.moves)

    def memory(self, block: int) -> torch.Tensor:
        stored = [one for layer in self.runner.kv.layers for one in (layer.k, layer.v)]
        return torch.cat([one[block].flatten().float() for one in stored if one is not None])


def expected(folder: Path, tokens: Sequence[int], gone: dict[int, int]) -> torch.Tensor:
    """The logits [T, vocabulary] of transformers, where no query sees what was dropped before."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    at = torch.arange(len(tokens))
    seen = at[None, :] <= at[:, None]
    for position, before in gone.items():
        seen[before:, position] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits
    return logits[0]


@contextmanager
def evicting(
    folder: Path, method: EvictionMethod, kernels: str = "auto", kv_dtype: str = "auto"
) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        str(folder),
        block_size=SIZE,
        kv_bytes=1 << 20,
        kernels=kernels,  # type: ignore[arg-type]
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        eviction=method,
    )
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("fixed", [(), range(0, 64, 2)], ids=["own blocks", "half are shared"])
@pytest.mark.sweep(4)
def test_logits_are_those_of_masked_tokens(
    tiny_model: Callable[..., Path],
    method: EvictionMethod,
    kernels: Literal["auto", "torch"],
    kv_dtype: str,
    fixed: Sequence[int],
) -> None:
    folder = tiny_model()
    tokens = [random.Random(5).randrange(VOCAB) for _ in range(LENGTH)]
    with evicting(folder, method, kernels, kv_dtype) as runner:
        assert bool(runner.without_kernels) == (kernels == "torch")
        sequence = Evicted(runner, tokens, fixed)
        sequence.run()
    assert len(sequence.gone) >= 2 * 2 * SIZE, "evicted twice"
    if method == "window":
        assert sequence.moved == 0, "whole blocks were dropped"
    wanted = expected(folder, tokens, sequence.gone)
    distance = (torch.cat(sequence.logits) - wanted).norm() / wanted.norm()
    assert distance < TOLERANCE[kv_dtype], distance


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "olmo2", "mixtral", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("method", ["window", "attention"])
def test_other_models(tiny_model: Callable[..., Path], kind: str, method: EvictionMethod) -> None:
    folder = tiny_model(kind)
    tokens = [random.Random(6).randrange(VOCAB) for _ in range(LENGTH)]
    with evicting(folder, method) as runner:
        sequence = Evicted(runner, tokens, ())
        sequence.run()
    wanted = expected(folder, tokens, sequence.gone)
    assert (torch.cat(sequence.logits) - wanted).norm() / wanted.norm() < 1e-3


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_models_with_windows_are_refused(tiny_model: Callable[..., Path], kind: str) -> None:
    with pytest.raises(ConfigError, match=r"kv\.eviction: .*sliding window"):
        ModelRunner.load(str(tiny_model(kind)), kv_bytes=1 << 20, eviction="window")


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "cohere"])
def test_triattention_is_refused_without_rotary_embeddings_of_its_order(
    tiny_model: Callable[..., Path], kind: str
) -> None:
    with pytest.raises(ConfigError, match=r"kv\.eviction: triattention needs rotary"):
        ModelRunner.load(str(tiny_model(kind)), kv_bytes=1 << 20, eviction="triattention")


# Around the length of the text, and the distance between its two runs.
@pytest.mark.parametrize("longest", [2, 63, 64, 65, 130, 300, 511, 512, 513, 575, 576, 577])
def test_triattention_measures_within_the_longest_sequence(
    tiny_model: Callable[..., Path], tmp_path: Path, longest: int
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    runner = ModelRunner.load(
        str(folder),
        block_size=16,
        kv_bytes=1 << 20,
        max_model_len=longest,
        eviction="triattention",
    )
    assert runner.evictor is not None
    assert runner.max_model_len == longest


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0}, unk_token="none")).to_str(),
        tokenizers.Tokenizer(tokenizers.models.BPE()).to_str(),
    ],
    ids=["without the words", "empty"],
)
def test_triattention_needs_no_tokenizer_that_knows_its_text(
    tiny_model: Callable[..., Path], tmp_path: Path, tokenizer: str
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "tokenizer.json").write_text(tokenizer)
    with evicting(folder, "triattention") as runner:
        assert runner.evictor is not None
