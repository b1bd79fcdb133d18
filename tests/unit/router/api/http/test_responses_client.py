"""OpenAI's own Python client against /v1/responses of a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from support.chat_models import TEMPLATE, THINKING, demo_with, prompts, says
from support.router_harness import RouterHarness, running_router

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "clock"}
QUESTION = "How is the weather in Bern?"
CITY = '{"city": "Bern"}'
CALLS = (
    'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return demo_with(TEMPLATE, tmp_path_factory.mktemp("models"))


@pytest.fixture
async def router(folder: str) -> AsyncIterator[RouterHarness]:
    async with running_router(folder=folder) as running:
        yield running


def client_of(router: RouterHarness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def client(router: RouterHarness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(router) as client:
        yield client


async def response(client: openai.AsyncOpenAI, streamed: bool, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION} | more
    if not streamed:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        numbers = [event.sequence_number async for event in stream]
        assert numbers == list(range(len(numbers)))
        return await stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
async def test_text(router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool) -> None:
    says(router, "It is {sunny} <b>today</b>.")
    found = await response(
        client, streamed, instructions="Be brief.", tools=[WEATHER], metadata={"a": "b"}
    )
    assert found.output_text == "It is {sunny} <b>today</b>."
    assert (found.status, found.metadata, found.store) == ("completed", {"a": "b"}, False)
    assert [one.name for one in found.tools] == ["weather"]
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert "<system>Be brief.<user>How is" in prompts(router)[0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_and_its_result(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, CALLS)
    first = await response(client, streamed, tools=[WEATHER, CLOCK])
    text, weather, clock = first.output
    assert (text.content[0].text, first.status) == ("Let me look.", "completed")
    assert (weather.name, weather.arguments) == ("weather", CITY)
    assert (clock.name, clock.arguments) == ("clock", "{}")
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": told}
        for one, told in zip(
            first.output[1:], ["rain", [{"type": "input_text", "text": "noon"}]], strict=True
        )
    ]
    says(router, "It rains.")
    turns = [{"role": "user", "content": QUESTION}, *first.output, *results]
    second = await response(client, streamed, input=turns, tools=[WEATHER, CLOCK])
    assert second.output_text == "It rains."
    assert (
        f'<assistant>Let me look.<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call><tool>rain<tool>noon<assistant>'
    ) in prompts(router)[1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", f'[{{"name": "weather", "arguments": {CITY}}}]'),
        ({"type": "function", "name": "weather"}, CITY),
    ],
)
async def test_forced_calls(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool, choice: Any, said: str
) -> None:
    says(router, said)
    found = await response(client, streamed, tools=[CLOCK, WEATHER], tool_choice=choice)
    (call,) = found.output
    assert (call.name, call.arguments, found.status) == ("weather", CITY, "completed")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_is_cut_off(client: openai.AsyncOpenAI, streamed: bool) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 3}
    if streamed:
        events = [one async for one in await client.responses.create(**asked, stream=True)]
        found: Any = events[-1].response  # type: ignore[union-attr]
        assert events[-1].type == "response.incomplete"
    else:
        found = await client.responses.create(**asked)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"
    assert found.usage.output_tokens == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning(tmp_path: Path, streamed: bool) -> None:
    async with (
        running_router(folder=demo_with(THINKING, tmp_path)) as router,
        client_of(router) as client,
    ):
        says(router, "<think>Rain?</think>\n\nIt rains.")
        found = await response(client, streamed, reasoning={"effort": "low"})
        thought, _ = found.output
        assert (thought.content[0].text, found.output_text) == ("Rain?", "It rains.")
        details = found.usage.output_tokens_details
        assert 0 < details.reasoning_tokens < found.usage.output_tokens
        turns = [
            {"role": "user", "content": QUESTION},
            *found.output,
            {"role": "user", "content": "Sure?"},
        ]
        await response(client, streamed, input=turns)
        assert "<thought>Rain?</thought>It rains.<user>Sure?" in prompts(router)[1]


async def test_a_limit_above_the_context_is_cut_to_it(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    for server in router.workers.values():
        server.worker.tokens_per_step = 256
    found = await response(client, False, max_output_tokens=10**6)
    assert (found.status, found.max_output_tokens) == ("incomplete", 10**6)
    assert found.usage.total_tokens == 4096


async def test_a_bound_answer_is_no_thinking(tmp_path: Path) -> None:
    async with (
        running_router(folder=demo_with(THINKING, tmp_path)) as router,
        client_of(router) as client,
    ):
        says(router, CITY)
        found = await client.responses.create(
            model="demo",
            input=QUESTION,
            text={"format": {"type": "json_object"}},
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        assert prompts(router)[0].rstrip().endswith("<think>")
    assert found.output_text == CITY


class City(pydantic.BaseModel):
    city: str


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_parsed_answer(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, CITY)
    if streamed:
        found = await response(client, True, text_format=City)
    else:
        found = await client.responses.parse(model="demo", input=QUESTION, text_format=City)
    assert found.output_parsed == City(city="Bern")


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": QUESTION,
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    seen = [one async for one in await client.responses.create(**asked, stream=True)]
    told = [one for one in seen if one.type == "response.output_text.delta"]
    assert sum(len(one.logprobs) for one in told) == 4
    whole: Any = await client.responses.create(**asked)
    for found in (seen[-1].response, whole):  # type: ignore[union-attr]
        scores = found.output[0].content[0].logprobs
        assert len(scores) == 4
        assert all(one.top_logprobs for one in scores)


async def test_instructions_are_one_system_message(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    says(router, "ok")
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Never lie."}]},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    await client.responses.create(model="demo", instructions="Be brief.", input=items)
    assert "<system>Be brief.\n\nNever lie.<user>a<user>b<assistant>" in prompts(router)[0]


async def test_an_error_in_a_stream(
    router: RouterHarness, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.runtime.stream.Stream.take", broken)
    stream = await client.responses.create(model="demo", input=QUESTION, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
