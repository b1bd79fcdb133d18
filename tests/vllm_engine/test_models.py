"""Models that the native engine refuses: with vLLM their tokens are those of one engine alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from faults.fleet import running_fleet
from faults.fleet_worker import Forks
from support.vllm_models import MAX_LEN, Build
from support.vllm_reference import alone

from kvrelay.client import AsyncClient

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
ANSWER = 16
WAIT_S = 300.0

# Sections of the configuration, and arguments of the engine alone.
LOCAL = {"prefill": {"replicas": 0}}
HALF = {"model": {"dtype": "bfloat16"}}
TEXT_ONLY = {"skip_tokenizer_init": False, "language_model_only": True}
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3_text": ({}, {}),
    "deepseek_v3": ({"kv": {"block_size": 16}}, {"block_size": 16}),
    "idefics3": ({}, TEXT_ONLY),
    "gptq": (HALF, {"dtype": "bfloat16"}),
    "awq": (HALF, {"dtype": "bfloat16"}),
    "mistral": (LOCAL, {}),
    "granitemoehybrid": (LOCAL, {"enable_prefix_caching": False}),
}


def prompts() -> list[list[int]]:
    """Of several lengths, from a part of a block to several chunks."""
    draw = random.Random(1)
    return [[draw.randrange(6, 2000) for _ in range(length)] for length in (9, 40, 70, 130, 300)]


@pytest.fixture(scope="module")
def expected(built: Build) -> dict[str, list[list[int]]]:
    """The answers of each family's engine alone, to one prompt after the other."""
    common = {"prompts": prompts(), "max_tokens": ANSWER, "one_by_one": True}
    orders = [
        {**common, "model": str(built(family)), "max_model_len": MAX_LEN, **arguments}
        for family, (_, arguments) in SERVED.items()
    ]
    return dict(zip(SERVED, alone(*orders), strict=True))


@pytest.mark.parametrize("family", SERVED)
async def test_tokens_are_those_of_one_engine_alone(
    family: str, built: Build, expected: dict[str, list[list[int]]], forks: Forks
) -> None:
    sections, _ = SERVED[family]
    model = {"path": str(built(family)), "max_model_len": None, **sections.get("model", {})}
    prefill = {"replicas": 1, **sections.get("prefill", {})}
    kv, decode = sections.get("kv", {}), {"replicas": 1}
    async with (
        running_fleet(forks, model=model, kv=kv, prefill=prefill, decode=decode) as fleet,
        AsyncClient(fleet.router.endpoints.grpc) as client,
    ):
        found = [
            await client.generate(
                token_ids=prompt,
                max_tokens=ANSWER,
                temperature=0.0,
                ignore_eos=True,
                timeout=WAIT_S,
            ).result()
            for prompt in prompts()
        ]
        said = await client.generate(
            messages=[{"role": "user", "content": "hello"}], max_tokens=2, timeout=WAIT_S
        ).result()
        for worker in fleet.alive:
            await fleet.at_rest(worker)
            await fleet.left_in_vllm(worker)
    assert fleet.max_model_len == MAX_LEN, "of the language model, if the model has several parts"
    assert [list(one.token_ids) for one in found] == expected[family]
    handed_over = sum(one.path == "disaggregated" for one in found)
    assert handed_over == (3 if prefill["replicas"] else 0)
    assert said.token_ids, "by the model's chat template"
