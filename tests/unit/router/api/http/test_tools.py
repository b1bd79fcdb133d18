"""Tools of a chat: described to the template, called in the answer, answered in the next turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.chat_models import TEMPLATE, demo_with, prompts, says
from support.router_harness import RouterHarness, running_router

from kvrelay.types.requests import Guidance
from kvrelay.worker_messages import Prefill, RunLocal

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
QUESTION = [{"role": "user", "content": "How is the weather in Bern?"}]
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


@pytest.fixture
async def client(router: RouterHarness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none") as client:
        yield client


async def message(
    client: openai.AsyncOpenAI, streamed: bool, **more: Any
) -> tuple[str | None, list[tuple[str, str, str]], str]:
    """Content, calls and finish reason of an answer."""
    asked: dict[str, Any] = {"model": "demo", "messages": QUESTION} | more
    if not streamed:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        calls = [
            (one.id, one.function.name, one.function.arguments)
            for one in choice.message.tool_calls or ()
        ]
        return choice.message.content, calls, choice.finish_reason
    content, finish = "", ""
    found: dict[int, list[str]] = {}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                found[call.index] = [call.id, call.function.name, ""]
            found[call.index][2] += call.function.arguments
    return content, [(one[0], one[1], one[2]) for one in found.values()], finish


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_with_calls(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, CALLS)
    content, calls, finish = await message(client, streamed, tools=[WEATHER, CLOCK])
    assert (content, finish) == ("Let me look.", "tool_calls")
    assert [one[1:] for one in calls] == [("weather", CITY), ("clock", "{}")]
    ids = [one[0] for one in calls]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert '"name": "weather"' in prompts(router)[0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_without_calls(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, "It is {sunny} <b>today</b>.")
    content, calls, finish = await message(client, streamed, tools=[WEATHER])
    assert (content, calls, finish) == ("It is {sunny} <b>today</b>.", [], "stop")


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_call_if_the_client_wants_no_parallel_calls(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, CALLS)
    _, calls, _ = await message(client, streamed, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [one[1] for one in calls] == ["weather"]


async def test_a_client_that_wants_no_calls_gets_text(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    says(router, CALLS)
    found = await message(client, False, tools=[WEATHER], tool_choice="none")
    assert found == (CALLS, [], "stop")
    assert "<tools>" not in prompts(router)[0]


async def test_the_next_turn_shows_the_call_and_its_result(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    says(router, CALLS)
    first = await client.chat.completions.create(model="demo", messages=QUESTION, tools=[WEATHER])
    said = first.choices[0].message
    assert said.tool_calls
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
    says(router, "It rains.")
    turns: list[Any] = [*QUESTION, said, result]
    answer = await client.chat.completions.create(model="demo", messages=turns, tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."
    assert (
        f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>' in prompts(router)[1]
    )
    assert "<tool>rain" in prompts(router)[1]


async def test_arguments_that_broke_off_stay_text(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    broken = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}}
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": "1", "content": "not JSON"},
    ]
    says(router, "ok")
    await client.chat.completions.create(model="demo", messages=turns, tools=[WEATHER])
    assert json.dumps('{"ci') in prompts(router)[0]


async def test_arguments_that_are_no_text_are_shown_without_it(
    router: RouterHarness, client: openai.AsyncOpenAI
) -> None:
    half = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "\\ud800"}'},
    }
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [half]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    says(router, "ok")
    answer = await client.chat.completions.create(model="demo", messages=turns)
    assert answer.choices[0].message.content == "ok"


async def test_variables_of_the_template(router: RouterHarness, client: openai.AsyncOpenAI) -> None:
    says(router, "ok")
    await message(
        client,
        False,
        messages=[{"role": "developer", "content": "Be brief."}, *QUESTION],
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"style": "brief"}},
    )
    (prompt,) = prompts(router)
    assert "<style>brief</style><effort>low</effort><system>Be brief.<user>" in prompt


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("more", "status", "field"),
    [
        ({"tools": [WEATHER, WEATHER]}, 400, "tools"),
        ({"tools": [named("a b")]}, 400, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, 501, "tools"),
        ({"tools": [CLOCK] * 129}, 400, "tools"),
        ({"tools": [WEATHER], "tool_choice": named("clock")}, 400, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, 400, "tool_choice"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"chat_template_kwargs": {"tools": []}}, 403, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, 400, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ({"messages": [{"role": "tool"}]}, 400, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages"),
    ],
)
@pytest.mark.sweep(3)
async def test_refused(
    router: RouterHarness, more: dict[str, Any], status: int, field: str
) -> None:
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
        response = await http.post("/v1/chat/completions", json={"messages": QUESTION} | more)
    assert (response.status_code, response.json()["error"]["param"]) == (status, field)


@pytest.mark.parametrize("reasoning", [None, "hm"])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
async def test_an_answer_that_was_cut_before_its_text_may_be_sent_back(
    router: RouterHarness, content: dict[str, Any], reasoning: str | None
) -> None:
    cut = {"role": "assistant", "reasoning_content": reasoning} | content
    messages = [*QUESTION, cut, {"role": "user", "content": "Go on."}]
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
        response = await http.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "seed": 1}
        )
        empty = [*QUESTION, cut | {"content": ""}, {"role": "user", "content": "Go on."}]
        same = await http.post(
            "/v1/chat/completions", json={"messages": empty, "max_tokens": 2, "seed": 1}
        )
    assert response.status_code == 200, response.text
    assert response.json()["usage"] == same.json()["usage"], "no template writes None"


async def test_tools_that_are_too_long(router: RouterHarness) -> None:
    long = {"type": "function", "function": {"name": "f", "description": "x" * 300_000}}
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
        body = {"messages": QUESTION, "tools": [long]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "262144" in response.json()["error"]["message"]


async def test_a_template_that_takes_no_tools(tmp_path: Path) -> None:
    folder = demo_with("{{ messages[0].content }}", tmp_path)
    async with (
        running_router(folder=folder) as router,
        httpx.AsyncClient(base_url=router.http) as http,
    ):
        body = {"messages": QUESTION, "tools": [WEATHER]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "takes no tools" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"


THINKING = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>
{%- if thinking %}<think>
{% endif %}{# </think> ends the thinking #}"""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_thinking_is_apart_from_the_answer(
    tmp_path: Path, streamed: bool, begun: bool
) -> None:
    folder = demo_with(THINKING, tmp_path)
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "extra_body": {"chat_template_kwargs": {"thinking": begun}},
    }
    async with (
        running_router(folder=folder) as router,
        openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none") as client,
    ):
        says(router, ("" if begun else "<think>") + "Rain?</think>\n\nIt rains.")
        if streamed:
            stream = await client.chat.completions.create(**asked, stream=True)
            parts = [chunk.choices[0].delta async for chunk in stream]
        else:
            parts = [(await client.chat.completions.create(**asked)).choices[0].message]
    thought = [(part.model_extra or {}).get("reasoning_content") or "" for part in parts]
    assert "".join(thought) == "Rain?"
    assert "".join(part.content or "" for part in parts) == "It rains."


async def test_an_answer_to_messages_may_fill_the_context(router: RouterHarness) -> None:
    says(router, "It rains. " * 60)
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
        found = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()
    assert found["choices"][0]["message"]["content"] == "It rains. " * 60
    assert found["usage"]["completion_tokens"] > 64


def guidance(router: RouterHarness) -> Guidance | None:
    """The grammar that the workers got."""
    (found,) = {
        command.spec.sampling.guidance
        for server in router.workers.values()
        for command in server.worker.commands
        if isinstance(command, Prefill | RunLocal)
    }
    return found


@pytest.mark.parametrize("streamed", [False, True])
async def test_required_calls_follow_a_grammar(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, '[{"name": "weather", "arguments": {"city": "Bern"}}]')
    content, calls, finish = await message(
        client, streamed, tools=[WEATHER, CLOCK], tool_choice="required"
    )
    assert (content or "", finish) == ("", "tool_calls")
    assert [one[1:] for one in calls] == [("weather", CITY)]
    found = guidance(router)
    assert found is not None
    schema = json.loads(found.source)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["weather", "clock"]
    parameters: dict[str, Any] = WEATHER["function"]["parameters"]  # type: ignore[index]
    assert schema["$defs"]["0"] == parameters | {"additionalProperties": False}


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_rest_of_required_calls_that_were_cut_off_is_no_content(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, '[{"name": "weather", "arguments": {"city": "Bern"}}, {"name": "clo')
    content, calls, _ = await message(
        client, streamed, tools=[WEATHER, CLOCK], tool_choice="required"
    )
    assert not content
    assert [one[1] for one in calls] == ["weather"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_answer_is_the_arguments_of_a_named_function(
    router: RouterHarness, client: openai.AsyncOpenAI, streamed: bool
) -> None:
    says(router, CITY)
    content, calls, finish = await message(
        client, streamed, tools=[CLOCK, WEATHER], tool_choice=named("weather")
    )
    assert (content or "", finish) == ("", "stop")
    assert [one[1:] for one in calls] == [("weather", CITY)]
