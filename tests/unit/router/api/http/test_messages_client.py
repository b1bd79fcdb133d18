"""Anthropic's own Python client against a router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import TEMPLATE, THINKING, demo_with, prompts, says
from support.router_harness import RouterHarness, running_router

anthropic = pytest.importorskip("anthropic")

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
QUESTION = [{"role": "user", "content": "How is the weather in Bern?"}]
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


def client_of(router: RouterHarness) -> Any:
    return anthropic.AsyncAnthropic(base_url=router.http, api_key="none", max_retries=0)


@pytest.fixture
async def client(router: RouterHarness) -> AsyncIterator[Any]:
    async with client_of(router) as client:
        yield client


async def message(client: Any, streamed: bool, **more: Any) -> Any:
    asked = {"model": "demo", "messages": QUESTION, "max_tokens": 200} | more
    if not streamed:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
async def test_text(router: RouterHarness, client: Any, streamed: bool) -> None:
    says(router, "It is {sunny} <b>today</b>.")
    found = await message(client, streamed, system="Be brief.", tools=[WEATHER])
    assert [one.to_dict() for one in found.content] == [
        {"type": "text", "text": "It is {sunny} <b>today</b>."}
    ]
    assert (found.role, found.stop_reason, found.stop_sequence) == ("assistant", "end_turn", None)
    assert found.usage.input_tokens > 0
    assert found.usage.output_tokens > 0
    assert found.id.startswith("msg_")
    assert "<system>Be brief.<user>How is" in prompts(router)[0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls(router: RouterHarness, client: Any, streamed: bool) -> None:
    says(router, CALLS)
    found = await message(client, streamed, tools=[WEATHER, CLOCK])
    text, weather, clock = found.content
    assert (text.text, found.stop_reason) == ("Let me look.", "tool_use")
    assert (weather.name, weather.input) == ("weather", {"city": "Bern"})
    assert (clock.name, clock.input) == ("clock", {})
    assert weather.id != clock.id


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_and_its_result(router: RouterHarness, client: Any, streamed: bool) -> None:
    says(router, CALLS)
    first = await message(client, streamed, tools=[WEATHER, CLOCK])
    says(router, "It rains.")
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": text, "is_error": error}
        for one, text, error in zip(
            first.content[1:],
            [[{"type": "text", "text": "rain"}], "no clock"],
            [False, True],
            strict=True,
        )
    ]
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    second = await message(client, streamed, messages=turns, tools=[WEATHER, CLOCK])
    assert second.content[0].text == "It rains."
    assert (
        '<assistant>Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}'
        '</tool_call><tool_call>{"name": "clock", "arguments": {}}</tool_call>'
        "<tool>rain<tool>Error: no clock<user>So?<assistant>"
    ) in prompts(router)[1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "any"}, '[{"name": "weather", "arguments": {"city": "Bern"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city": "Bern"}'),
    ],
)
async def test_forced_calls(
    router: RouterHarness, client: Any, streamed: bool, choice: dict[str, str], said: str
) -> None:
    says(router, said)
    found = await message(client, streamed, tools=[CLOCK, WEATHER], tool_choice=choice)
    (call,) = found.content
    assert (call.name, call.input, found.stop_reason) == ("weather", {"city": "Bern"}, "tool_use")


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_call_if_the_client_wants_no_parallel_calls(
    router: RouterHarness, client: Any, streamed: bool
) -> None:
    says(router, CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = await message(client, streamed, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert [one.type for one in found.content] == ["text", "tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_sequence_is_named(router: RouterHarness, client: Any, streamed: bool) -> None:
    says(router, "It rains today.")
    found = await message(client, streamed, stop_sequences=["never", " today"])
    assert found.content[0].text == "It rains"
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " today")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("most", "reason"), [(2, "max_tokens"), (10**6, "model_context_window_exceeded")]
)
@pytest.mark.sweep(2)
async def test_the_limits_of_an_answer(
    router: RouterHarness, client: Any, streamed: bool, most: int, reason: str
) -> None:
    for server in router.workers.values():
        server.worker.tokens_per_step = 256
    found = await message(client, streamed, max_tokens=most, timeout=60)
    assert found.stop_reason == reason


@pytest.mark.parametrize("streamed", [False, True])
async def test_arguments_that_were_cut_off(
    router: RouterHarness, client: Any, streamed: bool
) -> None:
    says(router, '{"a": 1, "city": "Be')
    choice = {"type": "tool", "name": "weather"}
    found = await message(client, streamed, tools=[WEATHER], tool_choice=choice)
    assert found.content[0].input == {"a": 1}


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking(tmp_path: Path, streamed: bool) -> None:
    async with (
        running_router(folder=demo_with(THINKING, tmp_path)) as router,
        client_of(router) as client,
    ):
        says(router, "<think>Rain?</think>\n\nIt rains.")
        found = await message(client, streamed, thinking={"type": "adaptive"})
        thinking, text = found.content
        assert (thinking.thinking, text.text) == ("Rain?", "It rains.")
        assert thinking.signature
        assert 0 < found.usage.output_tokens_details.thinking_tokens < found.usage.output_tokens
        turns = [
            *QUESTION,
            {
                "role": "assistant",
                "content": [*found.content, {"type": "redacted_thinking", "data": "x"}],
            },
            {"role": "user", "content": "Sure?"},
        ]
        await message(client, streamed, messages=turns, thinking={"type": "disabled"})
        first, second = prompts(router)
        assert "<think>" in first
        assert "<think>" not in second
        assert "<thought>Rain?</thought>It rains.<user>Sure?" in second


async def test_a_parsed_answer(router: RouterHarness, client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    says(router, '{"city": "Bern"}')
    found = await message(
        client, False, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(found.content[0].text) == {"city": "Bern"}


async def test_counted_tokens(router: RouterHarness, client: Any) -> None:
    more: dict[str, Any] = {"system": "Be brief.", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(model="demo", messages=QUESTION, **more)
    says(router, "ok")
    found = await message(client, False, **more)
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


async def test_errors_are_its_classes(router: RouterHarness, client: Any) -> None:
    for error, change in (
        (anthropic.BadRequestError, {"extra_body": {"temperature": -1}}),
        (anthropic.NotFoundError, {"model": "claude"}),
        (anthropic.PermissionDeniedError, {"extra_body": {"chat_template": "x"}}),
        (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "w"}]}),
    ):
        with pytest.raises(error) as caught:
            await message(client, False, **change)
        assert caught.value.body["error"]["message"]
        assert caught.value.request_id == caught.value.body["request_id"]


async def test_an_error_in_a_stream(
    router: RouterHarness, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.runtime.stream.Stream.take", broken)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await message(client, True)
    assert caught.value.body["error"]["type"] == "api_error"


async def test_models(client: Any) -> None:
    assert [one.id async for one in client.models.list()] == ["demo"]
