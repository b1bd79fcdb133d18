"""Checks whether kvrelay serves a transformers causal language model: builds a small model of the
class, saves and loads it, and compares its answers.

Each model is a folder with a tokenizer, loaded as by a worker and as by a router. A served model
generates the same tokens as transformers' `generate`, on torch's operators and on the native
kernels.
"""

from __future__ import annotations

import random
import re
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
import torch
from safetensors.torch import save_file
from small_configs import VOCAB, WINDOW, small_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvrelay.config.model_sections import ModelConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ModelRefused
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import SamplingParams
from router.frontend.model_card import ModelCard, ask_transformers

MODEL_TYPES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The causal language model classes of transformers, by the `model_type` of their configuration."""

NEW_TOKENS = 8
# Tokens.
PROMPT_LENGTHS = (3, 2 * WINDOW + 1, 37)
# Prompt tokens per step: the whole prompt, and a part.
CHUNKS = (64, 7)
# Kernels and their block size.
KERNELS: dict[Literal["torch", "auto"], int] = {"torch": 4, "auto": 16}
_KV_BYTES = 8 << 20
_GREEDY = SamplingParams(temperature=0)

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one class."""

    model_type: str
    result: Literal["served", "refused", "bug"]
    reason: str = ""


def verdict(model_type: str, folder: Path) -> Verdict:
    """Checks one class. Writes the model to the empty folder."""
    try:
        build(model_type, folder)
    except (ModelRefused, AssertionError):
        raise
    # transformers cannot create some classes. The loader refuses them.
    except Exception as error:  # noqa: BLE001
        write_unbuilt(model_type, folder, error)
    try:
        runner = ModelRunner.load(
            str(folder), block_size=KERNELS["torch"], kv_bytes=_KV_BYTES, kernels="torch"
        )
    except ModelRefused as refusal:
        return Verdict(model_type, "refused", short_reason(refusal.message, folder))
    wrong = _differences(runner, folder)
    return Verdict(model_type, "bug" if wrong else "served", "; ".join(wrong))


def build(model_type: str, folder: Path) -> None:
    """Writes a checkpoint with weights from a fixed seed. Biases, norms and sinks are also
    random, so that each of them affects the answers.
    """
    config = small_config(model_type)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_unbuilt(model_type: str, folder: Path, error: Exception) -> None:
    """Writes the configuration of the class with unrelated weights."""
    for path in folder.iterdir():
        path.unlink()
    try:
        small_config(model_type).save_pretrained(folder)
    # Without a configuration, the loader cannot be tested.
    except Exception:  # noqa: BLE001
        raise error from None
    save_file(
        {f"{i}": torch.zeros(2**12) for i in range(64)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one word per id."""
    words = {f"w{id_}": id_ for id_ in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


def short_reason(message: str, folder: Path) -> str:
    """Returns the message without the folder and without numbers that vary between runs."""
    text = re.sub(rf"{re.escape(str(folder))}[^:]*: ", "", message)
    return " ".join(re.sub(r"differ by [0-9.e+-]+ of", "differ in part of", text).split())[:240]


def _differences(runner: ModelRunner, folder: Path) -> list[str]:
    """Returns the differences between transformers and kvrelay: the runner, a runner with native
    kernels, and the router.
    """
    wrong: list[str] = []
    card = ModelCard.load(str(folder), ModelConfig(), ask_transformers)
    if (card.info.max_model_len, card.vocab_size) != (runner.max_model_len, runner.vocab_size):
        wrong.append(
            f"the router reads a context of {card.info.max_model_len} tokens and a vocabulary of "
            f"{card.vocab_size}"
        )
    if card.eos_token_ids != runner.eos_token_ids:
        wrong.append(f"the router ends answers at {sorted(card.eos_token_ids)}")
    assert Tokenizer.load(folder).vocab_size == VOCAB
    prompts = random_prompts()
    expected = generate(folder, prompts)
    if len({tuple(tokens[-NEW_TOKENS:]) for tokens in expected}) < 2:
        wrong.append("the answers do not depend on the prompts, so the comparison is meaningless")
    native = ModelRunner.load(str(folder), block_size=KERNELS["auto"], kv_bytes=_KV_BYTES)
    for one in (runner, native):
        wrong += [
            f"different tokens on {one.kernels} kernels with {chunk} prompt tokens per step"
            for chunk in CHUNKS
            if answers(one, prompts, chunk) != expected
        ]
        if resumed(one, prompts, expected) != expected:
            wrong.append(f"different tokens on {one.kernels} kernels after a failover")
        one.close()
    return wrong


def random_prompts() -> Tokens:
    """Returns a random prompt of each length."""
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB - 1) for _ in range(length)] for length in PROMPT_LENGTHS]


def generate(folder: Path, prompts: Sequence[Sequence[int]]) -> Tokens:
    """Generates the expected tokens with transformers and eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )[0].tolist()
        for prompt in prompts
    ]


def answers(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], chunk: int, *, new: int = NEW_TOKENS
) -> Tokens:
    """Generates tokens with a runner. The sequences join one by one, use scattered blocks, and
    prefill in chunks while other sequences decode.
    """
    tokens = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + new for prompt in prompts]
    computed = [0] * len(prompts)
    blocks = list(range(runner.num_blocks))
    random.Random(1).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(runner.layout.blocks_for(end))] for end in ends]
    joined = 0
    while any(len(mine) < end for mine, end in zip(tokens, ends, strict=True)):
        joined = min(joined + 1, len(tokens))
        active = [i for i in range(joined) if len(tokens[i]) < ends[i]]
        segments = []
        for i in active:
            part = tokens[i][computed[i] : computed[i] + chunk]
            computed[i] += len(part)
            last = computed[i] == len(tokens[i])
            request = SampleRequest(_GREEDY, tokens[i], len(prompts[i])) if last else None
            segments.append(Segment(part, computed[i] - len(part), tables[i], request))
        for i, sampled in zip(active, runner.run(segments), strict=True):
            tokens[i] += [one.token_id for one in sampled]
    return tokens


def resumed(runner: ModelRunner, prompts: Sequence[Sequence[int]], expected: Tokens) -> Tokens:
    """Generates the second half of each answer from the prompt and the first half, as after a
    failover.
    """
    half = NEW_TOKENS // 2
    begun = [tokens[: len(prompt) + half] for prompt, tokens in zip(prompts, expected, strict=True)]
    return answers(runner, begun, CHUNKS[-1], new=NEW_TOKENS - half)


def sweep(model_types: Sequence[str]) -> list[Verdict]:
    """Checks the classes in this process. Any exception other than a refusal is a bug."""
    verdicts = []
    for model_type in model_types:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                verdicts.append(verdict(model_type, Path(name)))
            except Exception as error:  # noqa: BLE001 - every exception is reported
                verdicts.append(
                    Verdict(model_type, "bug", f"{type(error).__name__}: {error!s:.300}")
                )
    return verdicts
