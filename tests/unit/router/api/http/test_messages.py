"""Bodies and errors of /v1/messages."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_harness import running_router

from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unimplemented
from kvrelay.types.chat import ChatMessage, ToolCall
from router.api.http.dialects.anthropic.requests import parse_count_tokens, parse_messages

USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"max_tokens": 5, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def messages_of(**more: Any) -> tuple[ChatMessage, ...]:
    return parse_messages(BODY | more).requests[0].messages


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in texts]


def test_turns_become_messages() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": ["\N{GRINNING FACE}"]}}
    turns = [
        {"role": "user", "content": text("a", "b")},
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                *text("c", "d"),
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": text("e", "f")},
                {"type": "tool_result", "tool_use_id": "2", "is_error": True},
                *text("g"),
            ],
        },
        {"role": "system", "content": "now"},
        {"role": "assistant", "content": []},
        USER,
    ]
    found = messages_of(messages=turns, system=text("x-anthropic-billing-header: 1", "s", "t"))
    assert found == (
        ChatMessage("system", "s\nt"),
        ChatMessage("user", "a\nb\nx"),
        ChatMessage(
            "assistant",
            "cd",
            tool_calls=(ToolCall("1", "f", '{"a": ["\N{GRINNING FACE}"]}'),),
            reasoning="hm",
        ),
        ChatMessage("tool", "e\nf", tool_call_id="1", name="f"),
        ChatMessage("tool", "Error: ", tool_call_id="2"),
        ChatMessage("user", "g"),
        ChatMessage("system", "now"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "x"),
    )


def test_options() -> None:
    completion = parse_messages(
        BODY
        | {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "stop_sequences": ["a", "b"],
            "stream": True,
            "seed": 3,
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "system": None,
        }
    )
    sampling = completion.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.stop, sampling.seed) == (4, ("a", "b"), 3)
    assert completion.stream


@pytest.mark.parametrize(
    ("choice", "mode", "named", "parallel"),
    [
        (None, "auto", None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", None, False),
        ({"type": "any"}, "required", None, True),
        ({"type": "tool", "name": "f"}, "required", "f", True),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_choices_of_tools(choice: Any, mode: str, named: str | None, parallel: bool) -> None:
    use = parse_messages(BODY | {"tools": [TOOL], "tool_choice": choice}).tool_use
    assert use is not None
    assert (use.mode, use.named, use.parallel) == (mode, named, parallel)
    function = {"name": "f", "parameters": {"type": "object"}}
    assert json.loads(use.described) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 2048},
        ),
        (
            {
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "low"},
                "chat_template_kwargs": {"thinking": "x"},
            },
            {"enable_thinking": True, "thinking": "x", "reasoning_effort": "low"},
        ),
    ],
)
def test_variables_of_the_template(more: dict[str, Any], variables: dict[str, Any]) -> None:
    assert json.loads(parse_messages(BODY | more).chat_options.template_kwargs) == variables


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_format_of_the_answer(field: str) -> None:
    given = {"type": "json_schema", "schema": {"type": "object"}}
    value = {"format": given} if field == "output_config" else given
    completion = parse_messages(BODY | {field: value})
    guidance = completion.requests[0].sampling.guidance
    assert guidance is not None
    assert (guidance.source, completion.names["guidance"]) == ('{"type": "object"}', field)


def block(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ({"max_tokens": None}, InvalidArgument, "max_tokens is"),
        ({"max_tokens": 0}, InvalidArgument, "max_tokens is 0"),
        ({"messages": []}, InvalidArgument, "messages is a list of 0"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, InvalidArgument, "end with"),
        ({"messages": [{"role": "tool", "content": "a"}]}, InvalidArgument, "messages[0].role"),
        (block({"type": "image", "source": {}}), InvalidArgument, "messages[0].content[0] is"),
        (block({"type": []}), InvalidArgument, "messages[0].content[0] is"),
        (block("x"), InvalidArgument, "messages[0].content[0] is 'x'"),
        (block({"type": "tool_use", "id": "1", "name": "f", "input": {}}), InvalidArgument, "role"),
        (block({"type": "thinking", "thinking": "a"}), InvalidArgument, "role"),
        (
            block({"type": "tool_result", "tool_use_id": "1"}, role="assistant"),
            InvalidArgument,
            "role",
        ),
        (
            block({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
            Unimplemented,
            "it must be 'text', since this model takes text only",
        ),
        (
            block({"type": "tool_use", "id": "1", "name": "f", "input": "{}"}, role="assistant"),
            InvalidArgument,
            "messages[0].content[0].input is '{}'; it must be an object",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, Unimplemented, "bash_20250124"),
        ({"tools": [{"name": "f"}]}, InvalidArgument, "tools[0].input_schema is missing"),
        ({"tools": [TOOL, TOOL]}, InvalidArgument, "two functions"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, InvalidArgument, "no name"),
        ({"tool_choice": {"type": "any"}}, InvalidArgument, "no tools"),
        ({"stop_sequences": ["x"] * 17}, InvalidArgument, "stop_sequences is a list of 17"),
        ({"thinking": {"type": "on"}}, Unimplemented, "thinking.type is 'on'"),
        *(
            ({"thinking": {"type": value}}, InvalidArgument, "thinking.type is ")
            for value in (1, 1.5, False, [], {}, ["on"])
        ),
        ({"mcp_servers": [{}]}, InvalidArgument, "mcp_servers"),
        ({"container": "c"}, InvalidArgument, "container"),
        ({"n": 2}, InvalidArgument, "'n' is not a field"),
        ({"chat_template": "x"}, PermissionDenied, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, PermissionDenied, "tools"),
    ],
)
def test_bodies_that_are_refused(more: dict[str, Any], kind: type[KvRelayError], says: str) -> None:
    with pytest.raises(kind) as caught:
        parse_messages(BODY | more)
    assert says in caught.value.message
    assert len(caught.value.message) < 400


def test_a_conversation_is_counted_as_it_would_be_sent() -> None:
    body = BODY | {"tools": [TOOL], "system": "s", "stream": True, "stop_sequences": ["x"]}
    counted, sent = parse_count_tokens(body), parse_messages(body)
    assert counted.requests[0].messages == sent.requests[0].messages
    assert (counted.tool_use, counted.chat_options) == (sent.tool_use, sent.chat_options)
    ended = [USER, {"role": "assistant", "content": "a"}]
    assert parse_count_tokens({"messages": ended}).requests[0].messages[-1].role == "assistant"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "input"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "max_tokens"]),
        _values,
    )
)
def test_any_object_is_parsed_or_a_typed_error(body: dict[str, Any]) -> None:
    for parse in (parse_messages, parse_count_tokens):
        with contextlib.suppress(KvRelayError):
            assert parse(BODY | body).requests


async def test_errors_have_anthropics_shape() -> None:
    async with (
        running_router() as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as http,
    ):
        thread = {"type": "create"}
        for path, given, status, kind in (
            ("/v1/messages", {"content": b"{"}, 400, "invalid_request_error"),
            ("/v1/messages", {"content": b" " * (2**22 + 1)}, 413, "request_too_large"),
            ("/v1/messages", {"json": BODY | {"model": "m"}}, 404, "not_found_error"),
            ("/v1/messages", {"json": BODY | {"nvext": {}}}, 403, "permission_error"),
            ("/v1/messages", {"json": BODY | {"thread": thread}}, 400, "invalid_request_error"),
            ("/v1/messages", {"json": BODY | {"prompt_embeds": ""}}, 400, "invalid_request_error"),
            ("/v1/messages/batches", {"json": {}}, 404, "not_found_error"),
        ):
            response = await http.post(path, **given)
            body = response.json()
            assert (response.status_code, body["type"], body["error"]["type"]) == (
                status,
                "error",
                kind,
            )
            assert body["error"]["message"]
            assert body["request_id"]
        assert (await http.get("/v1/messages")).json()["type"] == "error"
        # An unknown route beside it has OpenAI's shape.
        assert (await http.post("/v1/message", json={})).json()["error"]["code"] == 404
        told = (await http.post("/v1/messages", json=BODY | {"thread": thread})).json()
        assert told["error"]["details"]["error_code"] == "thread_unsupported_request"
