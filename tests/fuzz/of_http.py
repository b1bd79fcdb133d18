"""The HTTP endpoint: whatever is asked is answered in the shape of its dialect, and leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from fuzz.parser import Feed, Parser
from fuzz.rig import Rig, rig
from fuzz.spoil import TEXTS, garbled, json_bytes, spoiled, text

from router.api.http.dialects.anthropic.request_models import CountTokensRequest, MessagesRequest
from router.api.http.dialects.openai.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.http.dialects.responses.request_models import ResponsesRequest
from router.api.http.error_responses import is_anthropic

STATUSES = {200, 400, 403, 404, 405, 409, 413, 415, 429, 501, 504}
_COMPLETION = {
    "model": "demo",
    "prompt": [10, 11, 12],
    "max_tokens": 4,
    "n": 1,
    "stream": False,
    "temperature": 0.5,
    "seed": 3,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "echo": False,
    "presence_penalty": 0.1,
    "stream_options": {"include_usage": True},
    "request_id": "r",
    "return_token_ids": True,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 1,
    "priority": 0,
    "cache_salt": "s",
    "slo": {"ttft_ms": 500, "itl_ms": 50.5},
}
_CHAT = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
    ],
    "max_completion_tokens": 4,
    "logprobs": True,
    "top_logprobs": 1,
    "n": 1,
    "stream": True,
    "user": "u",
}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TOOLS = {
    "messages": [
        {"role": "user", "content": "hello", "name": "u"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ],
    "max_tokens": 8,
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
_MESSAGES = {
    "model": "demo",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "done"}],
                    "is_error": True,
                },
                {"type": "text", "text": "b"},
            ],
        },
    ],
    "stop_sequences": ["x"],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "top_k": 5,
    "stream": True,
}
_ASKED = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
}
_RESPONSES = {
    "model": "demo",
    "instructions": "s",
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "r"}],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ],
    "max_output_tokens": 8,
    "tools": [{"type": "function"} | _FUNCTION],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "store": False,
    "truncation": "auto",
    "stream": True,
}
_INPUT = {
    "input": "hello",
    "max_output_tokens": 8,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA, "strict": True}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
}
_BODIES: dict[str, list[Any]] = {
    "/v1/completions": [
        _COMPLETION,
        {"prompt": "Once upon a time"},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]], "n": 2},
        {"prompt": "a", "max_tokens": 8, "structured_outputs": {"json": _SCHEMA}},
        {"prompt": "a", "max_tokens": 8, "structured_outputs": {"choice": ["a", "b"]}},
        {"prompt": "a", "max_tokens": 8, "structured_outputs": {"grammar": 'start: "a"+'}},
    ],
    "/v1/chat/completions": [
        _CHAT,
        _TOOLS,
        _TOOLS | {"tool_choice": "auto", "stream": True},
        {"messages": _CHAT["messages"], "max_tokens": 8, "response_format": _FORMAT},
    ],
    "/v1/messages": [
        _MESSAGES,
        _ASKED,
        _MESSAGES | {"tool_choice": {"type": "any"}, "stream": False},
    ],
    "/v1/messages/count_tokens": [_MESSAGES, _ASKED],
    "/v1/responses": [
        _RESPONSES,
        _INPUT,
        _INPUT | {"stream": True},
        _RESPONSES | {"tool_choice": "required", "stream": False},
    ],
    "/tokenize": [
        {"prompt": "a", "add_special_tokens": True},
        {"messages": _CHAT["messages"], "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": [1, 2, 3], "model": "demo"}],
}
_GETS = (
    "/v1/models",
    "/v1/models/demo",
    "/health",
    "/metrics",
    "/version",
    "/openapi.json",
    "/",
    "/page/page.js",
    "/status.json",
)
_FORBIDDEN = (
    "chat_template",
    "kv_transfer_params",
    "prompt_embeds",
    "suffix",
    "previous_response_id",
    "container",
)
_MODELS = (
    *(CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest),
    *(MessagesRequest, CountTokensRequest, ResponsesRequest),
)
_WORDS = sorted({*(name for one in _MODELS for name in one.model_fields), *_FORBIDDEN})
_HEADERS = (
    *(
        "content-type: application/json",
        "content-encoding: gzip",
        "x-request-id: mine",
        "traceparent: 00-1-1-1",
    ),
    *(
        "content-length: -1",
        "host: evil",
        "accept: */*",
        "authorization: Bearer x",
        "transfer-encoding: chunked",
    ),
)


def http_request(draw: random.Random) -> bytes:
    """METHOD PATH, headers, an empty line and the body, as on the wire but for the version and the
    line ends.
    """
    if draw.random() < 0.12:
        method, path, body = (
            draw.choice(["GET", "HEAD", "DELETE", "PUT", "\0"]),
            draw.choice(_GETS),
            b"",
        )
    else:
        method, path = "POST", draw.choice(list(_BODIES))
        body = json_bytes(draw, spoiled(draw, draw.choice(_BODIES[path]), _WORDS))
    if draw.random() < 0.05:
        path = text(draw, path)
    headers = ["host: localhost:8000"] if draw.random() < 0.97 else []
    headers += draw.sample(_HEADERS, draw.choice([0, 0, 1, 2]))
    if draw.random() < 0.1:
        headers.append(f"x-request-id: {draw.choice(TEXTS)}")
    lines = [f"{method} {path}", *headers]
    head = "\n".join(line.replace("\n", " ") for line in lines).encode(errors="replace")
    return (garbled(draw, head) if draw.random() < 0.03 else head) + b"\n\n" + body


@contextmanager
def asking() -> Iterator[Feed]:
    with rig() as made:

        def feed(data: bytes) -> str:
            status = made.run(_ask(made, data))
            made.check_empty()
            return str(status)

        yield feed


async def _ask(made: Rig, data: bytes) -> int:
    head, _, body = data.partition(b"\n\n")
    line, *headers = head.split(b"\n")
    method, _, path = line.decode("latin-1").partition(" ")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": b"",
        "root_path": "",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 9),
        "state": {},
        "headers": [
            (name.strip().lower(), value.strip())
            for name, _, value in (one.partition(b":") for one in headers)
        ],
    }
    answered = asyncio.Event()
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    async with asyncio.timeout(60):
        await made.app(scope, receive, send)
    status: int = sent[0]["status"]
    content = b"".join(one.get("body", b"") for one in sent[1:])
    _check(status, sent[0]["headers"], content, method, scope["path"])
    return status


def _check(
    status: int, headers: list[tuple[bytes, bytes]], content: bytes, method: str, path: str
) -> None:
    assert status in STATUSES, f"{status}: {content[:500]!r}"
    for name, value in headers:
        assert not set(name + value) & set(b"\r\n\0"), (
            f"a header that splits the answer: {name!r}: {value[:200]!r}"
        )
    if status >= 400 and method != "HEAD":
        error = _strict(content)["error"]
        assert error["message"]
        if is_anthropic(path):
            assert error["type"].endswith("_error") or error["type"] == "request_too_large"
        else:
            assert error["code"] == status
        assert len(content) < 4000, "an error that repeats too much of what was sent"
    if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
        for line in filter(None, content.decode().split("\n")):
            if line == "data: [DONE]" or line.startswith("event: "):
                continue
            told = _strict(line.removeprefix("data: ").encode())
            assert "error" not in told
            assert told.get("type") not in ("error", "response.failed")


def _strict(data: bytes) -> Any:
    """JSON as others read it: without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(data, parse_constant=refuse)


PARSERS = (Parser("http", http_request, asking),)
