"""The log-probabilities of a prompt through a real cluster, over both paths."""

from __future__ import annotations

import random

import pytest
from support.running_cluster import RunningCluster

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import PromptLogprobs

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]


async def scores(cluster: RunningCluster, token_ids: list[int], path: str) -> PromptLogprobs:
    options = {"token_ids": token_ids, "max_tokens": 3, "temperature": 0.0, "prompt_logprobs": 2}
    done = await cluster.client.generate(**options).result()  # type: ignore[arg-type]
    assert done.path == path
    assert done.usage.cached_tokens == 0
    assert done.prompt_logprobs is not None
    return done.prompt_logprobs


async def test_a_prefix_has_the_same_on_each_path(cluster: RunningCluster) -> None:
    prompt = random.Random(11).choices(range(5, 300), k=300)
    for _ in range(2):  # the second time, the KV is cached
        long = await scores(cluster, prompt, "disaggregated")
        short = await scores(cluster, prompt[:40], "local")
        assert len(long) == 299
        assert len(short) == 39
        for of_long, of_short in zip(long, short, strict=False):
            assert of_long.logprob == pytest.approx(of_short.logprob, abs=1e-3)
            assert len(of_long.top) == 2
            assert of_long.top[0][1] >= max(of_long.top[1][1], of_long.logprob - 1e-6)


async def test_too_many_are_refused(cluster: RunningCluster) -> None:
    room = (await cluster.client.models())[0].max_model_len
    for options in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        with pytest.raises(InvalidArgument, match="prompt_logprobs") as refused:
            await cluster.client.generate(token_ids=[7] * (room // 2), **options).result()  # type: ignore[arg-type]
        assert refused.value.field == "prompt_logprobs"
