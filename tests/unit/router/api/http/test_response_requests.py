"""Bodies of /v1/responses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unimplemented
from kvrelay.types.chat import ChatMessage, ToolCall
from router.api.http.dialects.responses.requests import parse_response

TOOL = {"type": "function", "name": "f"}


def message(role: str, *parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_items_become_messages() -> None:
    items = [
        message("developer", part("d"), part("e")),
        message("user", "a"),
        {"type": "message"} | message("user", "b"),
        {"type": "reasoning", "id": "rs", "summary": [part("sum", "summary_text")]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [part("x", "reasoning_text"), part("y", "reasoning_text")],
            "encrypted_content": None,
        },
        message("assistant", part("c", "output_text"), {"type": "refusal", "refusal": "no"}),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "function_call_output", "call_id": "2", "output": [part("s")]},
        message("system", "now"),
        {"type": None} | message("user", "z"),
    ]
    (request,) = parse_response({"input": items, "instructions": "i"}).requests
    assert request.messages == (
        ChatMessage("system", "i\n\nde"),
        ChatMessage("user", "a"),
        ChatMessage("user", "b"),
        ChatMessage(
            "assistant", "cno", tool_calls=(ToolCall("1", "f", "{}"),), reasoning="sumx\ny"
        ),
        ChatMessage("tool", "r", tool_call_id="1", name="f"),
        ChatMessage("tool", "s", tool_call_id="2"),
        ChatMessage("system", "now"),
        ChatMessage("user", "z"),
    )


def test_fields_that_clients_send_by_default() -> None:
    body = {
        "input": "x",
        "include": ["reasoning.encrypted_content"],
        "store": True,
        "background": False,
        "conversation": None,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "none", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "auto",
        "tools": [],
        "tool_choice": "auto",
        "client_metadata": {"a": "b"},
        "service_tier": "auto",
    }
    completion = parse_response(body)
    assert completion.requests[0].messages == (ChatMessage("user", "x"),)
    assert completion.requests[0].sampling.max_tokens is None
    assert completion.tool_use is None
    assert completion.chat_options.template_kwargs == (
        '{"reasoning_effort": "none", "enable_thinking": false}'
    )


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ({"input": None}, InvalidArgument, "input"),
        ({"input": []}, InvalidArgument, "input is a list of 0"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, InvalidArgument, "stores no items"),
        ({"input": [{"type": "computer_call"}]}, InvalidArgument, "input[0] is"),
        ({"input": [{"type": []}]}, InvalidArgument, "input[0] is"),
        ({"input": ["x"]}, InvalidArgument, "input[0] is 'x'"),
        (
            {"input": [message("user", {"type": "input_image", "image_url": "u"})]},
            Unimplemented,
            "input[0].content[0].type is 'input_image'",
        ),
        ({"previous_response_id": "resp_1"}, InvalidArgument, "send the earlier items in input"),
        ({"conversation": {"id": "c"}}, InvalidArgument, "send the earlier items in input"),
        ({"prompt": {"id": "p"}}, InvalidArgument, "send instructions and input"),
        ({"background": True}, InvalidArgument, "background"),
        ({"tools": [{"type": "web_search"}]}, Unimplemented, "tools[0].type is 'web_search'"),
        ({"tools": [TOOL, TOOL]}, InvalidArgument, "two functions"),
        ({"tool_choice": "required"}, InvalidArgument, "no tools"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, Unimplemented, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, InvalidArgument, "schema"),
        ({"top_logprobs": 2}, InvalidArgument, "include"),
        ({"metadata": {str(number): "" for number in range(17)}}, InvalidArgument, "metadata"),
        ({"metadata": {"a": "x" * 513}}, InvalidArgument, "metadata.a is"),
        ({"metadata": {"x" * 65: ""}}, InvalidArgument, "metadata."),
        ({"metadata": {"x" * 10**6: 5}}, InvalidArgument, "metadata."),
        ({"max_output_tokens": 0}, InvalidArgument, "max_output_tokens is 0"),
        ({"nvext": {}}, PermissionDenied, "nvext"),
        ({"messages": []}, InvalidArgument, "'messages' is not a field"),
    ],
)
def test_bodies_that_are_refused(more: dict[str, Any], kind: type[KvRelayError], says: str) -> None:
    with pytest.raises(kind) as caught:
        parse_response({"input": "x"} | more)
    assert says in caught.value.message
    assert len(caught.value.message) < 400


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "format"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["input", "instructions", "tools", "tool_choice", "text", "reasoning"]),
        _values,
    )
)
def test_any_object_is_parsed_or_a_typed_error(body: dict[str, Any]) -> None:
    with contextlib.suppress(KvRelayError):
        assert parse_response({"input": "x"} | body).requests
