"""An application on `anthropic`: messages, tools and structured output."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from case_server import Server, serve_cases
from week import PLAN, SAVED, STORY, TOOL, TOOL_SAYS, Week, closed, parsed, told

TOOL_PARAM: Any = {
    "name": TOOL,
    "description": TOOL_SAYS,
    "input_schema": closed(),
    "cache_control": {"type": "ephemeral"},
}
ASK: list[Any] = [{"role": "user", "content": PLAN}]
MAX_TOKENS = 2000
# The client has no argument for the temperature any more.
GREEDY = {"temperature": 0}


def client_of(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def messages(server: Server) -> Any:
    found = client_of(server).messages.create(
        model=server.model,
        max_tokens=MAX_TOKENS,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": STORY}],
        extra_body=GREEDY,
        metadata={"user_id": "someone"},
    )
    (block,) = found.content
    assert block.type == "text"
    assert found.stop_reason == "end_turn"
    return told(block.text), found.usage.output_tokens


def messages_streamed(server: Server) -> Any:
    with client_of(server).messages.stream(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": STORY}],
        extra_body=GREEDY,
    ) as stream:
        pieces = list(stream.text_stream)
        found = stream.get_final_message()
    assert len(pieces) > 2
    assert "".join(pieces) == found.content[0].text
    return told(found.content[0].text), found.usage.output_tokens


def tool_loop(server: Server) -> Any:
    client, turns = client_of(server), list(ASK)
    first = client.messages.create(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=turns,
        tools=[TOOL_PARAM],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    )
    return _with_result(client, server, turns, first)


def tool_loop_streamed(server: Server) -> Any:
    client, turns = client_of(server), list(ASK)
    with client.messages.stream(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=turns,
        tools=[TOOL_PARAM],
        tool_choice={"type": "tool", "name": TOOL},
        extra_body=GREEDY,
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        first = stream.get_final_message()
    (call,) = first.content
    assert json.loads("".join(pieces)) == call.input
    return _with_result(client, server, turns, first)


def _with_result(client: anthropic.Anthropic, server: Server, turns: list[Any], first: Any) -> Any:
    (call,) = first.content
    assert (call.type, call.name, first.stop_reason) == ("tool_use", TOOL, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": SAVED}
    turns += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=turns,
        tools=[TOOL_PARAM],
        tool_choice={"type": "none"},
        extra_body=GREEDY,
    )
    return parsed(call.input), first.usage.output_tokens, told(last.content[0].text)


def tool_runner(server: Server) -> Any:
    """The client's own loop, with a function as the tool."""
    saved: list[str] = []
    runner = _runner(server, saved)
    return told(runner.until_done().content[0].text), saved


def tool_runner_streamed(server: Server) -> Any:
    saved: list[str] = []
    last: Any = None
    for stream in _runner(server, saved, stream=True):
        last = stream.get_final_message()
    return told(last.content[0].text), saved


def _runner(server: Server, saved: list[str], **more: Any) -> Any:
    @anthropic.beta_tool
    def save_week(monday: str, tuesday: str) -> str:
        """Saves the plans of two days."""
        saved.append(f"{monday} {tuesday}")
        return SAVED

    return client_of(server).beta.messages.tool_runner(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": STORY}],
        tools=[save_week],
        extra_body=GREEDY,
        **more,
    )


def parse(server: Server) -> Any:
    found = client_of(server).messages.parse(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=ASK,
        output_format=Week,
        extra_body=GREEDY,
    )
    return parsed(found.parsed_output)


def parse_with_tools(server: Server) -> Any:
    """An agent that may call a tool, and whose last answer follows a schema."""
    found = client_of(server).messages.parse(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=ASK,
        output_format=Week,
        tools=[TOOL_PARAM],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    )
    return _call_or_week(found)


def parse_streamed(server: Server) -> Any:
    with client_of(server).messages.stream(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=ASK,
        output_format=Week,
        extra_body=GREEDY,
    ) as stream:
        assert len(list(stream.text_stream)) > 2
        return parsed(stream.get_final_message().parsed_output)


def parse_with_tools_streamed(server: Server) -> Any:
    with client_of(server).messages.stream(
        model=server.model,
        max_tokens=MAX_TOKENS,
        messages=ASK,
        output_format=Week,
        tools=[TOOL_PARAM],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    ) as stream:
        return _call_or_week(stream.get_final_message())


def _call_or_week(found: Any) -> str:
    calls = [one.input for one in found.content if one.type == "tool_use"]
    assert len(calls) <= 1
    return parsed(calls[0] if calls else found.parsed_output)


def count_tokens(server: Server) -> Any:
    found = client_of(server).messages.count_tokens(
        model=server.model, messages=ASK, tools=[TOOL_PARAM]
    )
    assert found.input_tokens > 0
    return found.input_tokens


def models(server: Server) -> Any:
    names = [one.id for one in client_of(server).models.list()]
    assert server.model in names
    return names


if __name__ == "__main__":
    serve_cases(
        {
            "messages": messages,
            "messages, streamed": messages_streamed,
            "tool loop": tool_loop,
            "tool loop, streamed": tool_loop_streamed,
            "tool_runner": tool_runner,
            "tool_runner, streamed": tool_runner_streamed,
            "parse": parse,
            "parse, streamed": parse_streamed,
            "parse with tools": parse_with_tools,
            "parse with tools, streamed": parse_with_tools_streamed,
            "count_tokens": count_tokens,
            "models": models,
        }
    )
