"""Every served architecture against transformers' own `generate` with its eager attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.ragged_sequences import NEW_TOKENS, PROMPT_LENGTHS, RaggedSequences, random_prompts
from support.tiny_models import SERVED
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from kvrelay.engine.base.quantised_kv import STORED, dequantise, quantise
from kvrelay.engine.runner import ModelRunner

BLOCK_SIZES = {"torch": 4, "auto": 16}  # native kernels take multiples of 16


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return random_prompts()


def rounded(stored: torch.dtype, tensor: torch.Tensor, *, keys: bool) -> torch.Tensor:
    return dequantise(*quantise(tensor, stored, keys=keys), tensor.dtype, keys=keys)


def quantise_latents(model: Any, stored: torch.dtype) -> None:
    """Layers with latent attention expand latent vectors that have been quantised together with
    the part of K that has positions.
    """
    for module in model.modules():
        if (expand := getattr(module, "expand_kv", None)) is None:
            continue

        def expand_kv(latent: Any, positions: Any, expand: Any = expand) -> Any:
            together = rounded(stored, torch.cat((latent, positions), -1), keys=True)
            return expand(*together.split([latent.shape[-1], positions.shape[-1]], -1))

        module.expand_kv = expand_kv


def quantised_eager(
    stored: torch.dtype,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **kw: Any,
) -> Any:
    """The model's own eager attention, over keys and values that have been quantised."""
    if not hasattr(module, "expand_kv"):
        key, value = rounded(stored, key, keys=True), rounded(stored, value, keys=False)
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, *rest, **kw
    )


for name, stored in STORED.items():
    AttentionInterface.register(f"{name}_eager", functools.partial(quantised_eager, stored))
    AttentionMaskInterface.register(f"{name}_eager", eager_mask)


def oracle(
    folder: Path, prompts: Sequence[Sequence[int]], kv_dtype: str = "auto"
) -> list[list[int]]:
    attention = "eager" if kv_dtype == "auto" else f"{kv_dtype}_eager"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    if kv_dtype != "auto":
        quantise_latents(model, STORED[kv_dtype])
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


@pytest.fixture(scope="module")
def generated(
    tiny_model: Callable[[str], Path], prompts: list[list[int]]
) -> Callable[[str, str], list[list[int]]]:
    """generated(architecture, kv_dtype) -> what transformers makes of the prompts, computed
    once.
    """

    @functools.cache
    def answers(architecture: str, kv_dtype: str) -> list[list[int]]:
        return oracle(tiny_model(architecture), prompts, kv_dtype)

    return answers


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("architecture", SERVED)
def test_ragged_chunked_fragmented_and_handed_off_equals_generate(
    architecture: str,
    kv_dtype: Literal["auto", "int8", "int4"],
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
    assert len({tuple(tokens[-NEW_TOKENS:]) for tokens in expected}) > 1, (
        "answers that do not depend on the prompt"
    )

    straight = RaggedSequences(runners[0], prompts, chunk=64, contiguous=True)
    while not straight.done:
        straight.step()
    assert straight.tokens == expected

    moved = RaggedSequences(runners[0], prompts, chunk=7, contiguous=False)
    for _ in range(7):  # some prompts are computed in part, some sequences decode
        moved.step()
    assert 0 < moved.computed[2] < PROMPT_LENGTHS[2]
    assert len(moved.tokens[0]) > PROMPT_LENGTHS[0]
    moved.hand_off(runners[1], seed=1)
    runners[0].kv.buffer.zero_()
    while not moved.done:
        moved.step()
    assert moved.tokens == expected
