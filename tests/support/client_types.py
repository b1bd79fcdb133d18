"""Answers as the types of the OpenAI and Anthropic clients describe them. The clients themselves do
not check what they read; this does.
"""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_WHOLE: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletion),
    "/v1/responses": TypeAdapter(Response),
    "/v1/messages": TypeAdapter(Message),
    "/v1/messages/count_tokens": TypeAdapter(MessageTokensCount),
}
_EVENT: dict[str, TypeAdapter[Any]] = {
    "/v1/completions": TypeAdapter(Completion),
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
    "/v1/messages": TypeAdapter(RawMessageStreamEvent),
}
_OPEN, _ENDED = '"finish_reason":null', '"finish_reason":"stop"'
STREAMED = frozenset(_EVENT)
# The events that end a stream.
_LAST = {
    "/v1/completions": ("[DONE]",),
    "/v1/chat/completions": ("[DONE]",),
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}


def check_answer(path: str, body: str) -> None:
    """Raises unless the body is what a client of the route expects of a whole answer."""
    if path in _WHOLE:
        _WHOLE[path].validate_json(body)


def check_stream(path: str, body: str) -> list[dict[str, Any]]:
    """Raises unless the body is a whole stream of events, as a client of the route expects them.
    Returns the events.
    """
    assert body.endswith("\n\n"), body[-200:]
    found, last = [], ""
    for text in body.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in text.split("\n"))
        assert lines.keys() <= {"event", "data"}, text[:200]
        last = lines.get("event", lines["data"])
        if lines["data"] == "[DONE]":
            continue
        event = json.loads(lines["data"])
        assert "error" not in event, event
        assert lines.get("event", event.get("type")) == event.get("type"), text[:200]
        # The client of messages skips pings, and a stream of completions has no end reason yet.
        if event.get("type") != "ping":
            _EVENT[path].validate_json(lines["data"].replace(_OPEN, _ENDED))
        found.append(event)
    assert last in _LAST[path], last
    if path == "/v1/responses":
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def check_error(path: str, body: str) -> str:
    """Raises unless the body is an error in the shape of the route. Returns its message."""
    told = json.loads(body)
    error = told["error"]
    assert error["message"], body
    assert error["type"], body
    if path.startswith("/v1/messages"):
        assert (told["type"], bool(told["request_id"])) == ("error", True), body
    else:
        assert error.keys() == {"message", "type", "param", "code"}, body
    for leaked in ("Traceback", " object at 0x", "pydantic", 'File "'):
        assert leaked not in body, body
    message: str = error["message"]
    return message
