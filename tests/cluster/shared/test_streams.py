"""Many streams at once through a real cluster, and requests that are wrong."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from support.running_cluster import RunningCluster

from kvrelay.client import Completion
from kvrelay.errors import InvalidArgument, KvRelayError, NotFound

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]


async def complete(cluster: RunningCluster, token_ids: list[int], **options: object) -> Completion:
    defaults = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    async with cluster.client.generate(token_ids=token_ids, **{**defaults, **options}) as stream:  # type: ignore[arg-type]
        return await stream.result()


async def test_64_streams_of_mixed_length(cluster: RunningCluster) -> None:
    draw = random.Random(7)
    lengths = [round(4 * 200 ** draw.random()) for _ in range(64)]
    answers = [draw.randint(2, 40) for _ in range(64)]
    prompts = [[draw.randrange(300) for _ in range(length)] for length in lengths]
    completions = await asyncio.gather(
        *(
            complete(cluster, prompt, max_tokens=n)
            for prompt, n in zip(prompts, answers, strict=True)
        )
    )
    for completion, prompt, n in zip(completions, prompts, answers, strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (n, "length")
        assert completion.usage.prompt_tokens == len(prompt)
        assert completion.ledger is not None
        assert sum(seconds for _, seconds in completion.ledger.phases) == pytest.approx(
            completion.ledger.ttft_seconds
        )
        if completion.path == "disaggregated":
            handoff = completion.ledger.handoff
            assert handoff is not None
            assert handoff.bytes == handoff.blocks * handoff.block_bytes > 0
    attempts = [
        one for completion in completions if completion.ledger for one in completion.ledger.attempts
    ]
    assert {one.path for one in attempts} == {"disaggregated", "local"}
    assert len({one.prefill_worker for one in attempts if one.prefill_worker}) == 2, (
        "both prefill workers had work"
    )
    assert len({one.decode_worker for one in attempts}) == 2, "both decode workers had work"

    status = await cluster.settled()
    for pool in status.pools:
        for worker in pool.workers:
            load = worker.load
            assert load.integrity_ok, load.integrity_error
            assert load.kv_bytes == load.blocks_total * status.block_bytes
            assert load.kv_bytes <= 128 * 2**20 < load.kv_bytes + status.block_bytes, (
                "as the configuration says"
            )

    again = await asyncio.gather(
        *(complete(cluster, prompt, max_tokens=8) for prompt in prompts[:8])
    )
    for first, second in zip(completions, again, strict=False):
        shorter = min(len(first.token_ids), 8)
        assert second.token_ids[:shorter] == first.token_ids[:shorter], (
            "alone or in a crowd, the same tokens"
        )


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"prompt": ""}, InvalidArgument, "prompt"),
        ({"prompt": "a", "model": "gpt-9"}, NotFound, "model"),
        ({"prompt": "a", "temperature": float("nan")}, InvalidArgument, "temperature"),
        ({"token_ids": [5] * 5000}, InvalidArgument, "token_ids"),
        ({"prompt": "a", "max_tokens": 5000}, InvalidArgument, "max_tokens"),
        ({"token_ids": [10**6]}, InvalidArgument, "token_ids"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_harms_nothing(
    cluster: RunningCluster, options: dict[str, object], error: type[KvRelayError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await cluster.client.generate(**options).result()  # type: ignore[arg-type]
    assert caught.value.field == field
    assert len((await complete(cluster, [20, 21, 22])).token_ids) == 16


async def test_a_stream_that_is_left_gives_its_blocks_back(cluster: RunningCluster) -> None:
    async with cluster.client.generate(
        token_ids=[30] * 300, max_tokens=2000, ignore_eos=True
    ) as stream:
        await anext(stream)
    await cluster.settled()


async def test_openai_clients_get_the_same_tokens(cluster: RunningCluster) -> None:
    prompt = [40 + i % 90 for i in range(150)]
    expected = await complete(cluster, prompt, max_tokens=12)
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(base_url=cluster.local.endpoints.http, timeout=60) as http:
        answer = (await http.post("/v1/completions", json=body)).raise_for_status()
        assert tuple(answer.json()["choices"][0]["token_ids"]) == expected.token_ids
        async with http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as streamed:
            lines = [line async for line in streamed.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 3
        assert (await http.get("/health")).status_code == 200
        assert "kvrelay_prompt_tokens" in (await http.get("/metrics")).text
        bad = await http.post("/v1/completions", json={**body, "temperature": -1})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
