"""OpenAI's own Python client against a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fake_worker import answer
from support.router_harness import DEMO, RouterHarness, running_router

from kvrelay.tokenizer.tokenizer import Tokenizer

openai = pytest.importorskip("openai")

PROMPT = list(range(10, 50))
MESSAGES = [{"role": "user", "content": "hello"}]
TOKENIZER = Tokenizer.load(DEMO)


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    async with running_router() as running:
        yield running


@pytest.fixture
async def client(router: RouterHarness) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(
        base_url=f"{router.http}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


async def freed(router: RouterHarness) -> None:
    async with asyncio.timeout(60):
        while any(one.worker.sequences or one.worker.prompts for one in router.workers.values()):
            await asyncio.sleep(0.005)


async def test_completion(client: Any) -> None:
    found = await client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, seed=7, n=2, logprobs=1
    )
    assert [one.index for one in found.choices] == [0, 1]
    assert found.choices[0].text == TOKENIZER.decode(answer(tuple(PROMPT), 7, 8))
    assert found.choices[0].finish_reason == "length"
    assert len(found.choices[0].logprobs.token_logprobs) == 8
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (40, 16)
    assert found.usage.prompt_tokens_details.cached_tokens == 0


async def test_streamed_completion(client: Any) -> None:
    stream = await client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=8,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == TOKENIZER.decode(answer(tuple(PROMPT), 7, 8))
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


async def test_chat(client: Any) -> None:
    asked = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 7}
    found = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    message = found.choices[0].message
    assert message.role == "assistant"
    assert len(found.choices[0].logprobs.content) == 8
    deltas = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        deltas += [choice.delta for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content


async def test_stop(client: Any) -> None:
    text = TOKENIZER.decode(answer(tuple(PROMPT), 7, 40))
    stop = text[10:14]
    found = await client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, seed=7, stop=[stop]
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (
        text[: text.index(stop)],
        "stop",
    )


async def test_errors_are_its_classes(client: Any, router: RouterHarness) -> None:
    for error, change in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.PermissionDeniedError, {"extra_body": {"chat_template": "x"}}),
        (openai.InternalServerError, {"extra_body": {"prompt_embeds": "x"}}),  # 501
    ):
        with pytest.raises(error) as caught:
            await client.completions.create(**({"model": "demo", "prompt": PROMPT} | change))
        assert caught.value.type
        assert caught.value.param
        assert caught.value.request_id
    await freed(router)


async def test_models(client: Any) -> None:
    assert [one.id async for one in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "kvrelay"


async def test_leaving_a_stream_frees_the_workers(client: Any, router: RouterHarness) -> None:
    stream = await client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4000, n=2, stream=True
    )
    await anext(aiter(stream))
    await stream.close()
    await freed(router)


async def test_fifty_streams_at_once(client: Any, router: RouterHarness) -> None:
    async def one(seed: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, seed=seed, stream=True
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async with asyncio.timeout(60):
        texts = await asyncio.gather(*(one(seed) for seed in range(50)))
    assert texts == [TOKENIZER.decode(answer(tuple(PROMPT), seed, 8)) for seed in range(50)]
    await freed(router)
