"""Structured output over HTTP: what a request asks for reaches the workers as a grammar."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.router_harness import RouterHarness, running_router

from kvrelay.errors import Code
from kvrelay.types.requests import Guidance
from kvrelay.worker_messages import Prefill, RunLocal
from router.api.http import structured_output
from router.api.http.chat import answer_format

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = SCHEMA | {"additionalProperties": False}
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "/v1/completions": {"prompt": "hello", "max_tokens": 8},
}


CHOICE = 'start: TEXT\nTEXT: "ä \\"x\\"" | "b"'
# Large, and answered in time.
LARGE = {
    "choices": {"structured_outputs": {"choice": [f"v1_{one:05d}" for one in range(4000)]}},
    "properties": {
        "structured_outputs": {
            "json": {"properties": {f"p{one}_": {"type": "string"} for one in range(1000)}}
        }
    },
}


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    async with running_router() as running:
        yield running


async def asked(router: RouterHarness, path: str, more: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
        return await http.post(path, json=BODIES[path] | more)


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("more", "kind", "source"),
    [
        ({"response_format": schema_format(SCHEMA)}, "json_schema", json.dumps(CLOSED)),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": '{"type":"null"}'}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a|b"}}, "regex", "a|b"),
        ({"structured_outputs": {"choice": ['ä "x"', "b"]}}, "lark", CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"response_format": {"type": "text"}}, None, ""),
    ],
)
async def test_workers_get_the_grammar(
    router: RouterHarness, path: str, more: dict[str, Any], kind: Any, source: str
) -> None:
    assert (await asked(router, path, more)).status_code == 200
    (found,) = {
        command.spec.sampling.guidance
        for server in router.workers.values()
        for command in server.worker.commands
        if isinstance(command, Prefill | RunLocal)
    }
    assert found == (kind and Guidance(kind, source))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reason", ["guidance is not accepted: too slow", "token 1 does not follow guidance; resume"]
)
async def test_what_a_worker_refuses_late_names_the_field_as_it_was_sent(
    router: RouterHarness, reason: str, stream: bool
) -> None:
    for server in router.workers.values():
        server.worker.fail, server.worker.fail_text = Code.INVALID_ARGUMENT, reason
    sent = {"structured_outputs": {"regex": "a|b"}, "stream": stream}
    answer = await asked(router, "/v1/completions", sent)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "structured_outputs"
    assert error["message"] == reason.replace("guidance", "structured_outputs")


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"response_format": schema_format({"type": "nothing"})}, "response_format"),
        ({"response_format": schema_format({"$ref": "http://127.0.0.1/x"})}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"const": 2**53 + 1}}}, "structured_outputs"),
        ({"response_format": schema_format({"minimum": -(10**100)})}, "response_format"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"enum": [1]}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs"),
        ({"structured_outputs": {"json": "["}, "tools": TOOLS}, "structured_outputs"),
        ({"structured_outputs": {"json": "[" * 60_000}, "tools": TOOLS}, "structured_outputs"),
        ({"structured_outputs": {"json": " " * 70_000}, "tools": TOOLS}, "structured_outputs"),
        (
            {"response_format": schema_format({"const": 2**53 + 1}), "tools": TOOLS},
            "response_format",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"const": 2**53 + 1}},
                            },
                        },
                    }
                ],
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"type": 1}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
@pytest.mark.sweep(3)
async def test_refused(router: RouterHarness, more: dict[str, Any], field: str) -> None:
    response = await asked(router, CHAT, more)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert not any(server.worker.commands for server in router.workers.values())


@pytest.mark.parametrize("begin", ["#", ""])
async def test_references_of_a_tools_schema_hold(router: RouterHarness, begin: str) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": f"{begin}/$defs/node"}, {"type": "null"}]}},
    }
    parameters = {"$id": "http://a/b", "$ref": "#/$defs/node", "$defs": {"node": node}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = await asked(router, CHAT, {"tools": tools, "tool_choice": "required"})
    assert response.status_code == 200, response.text


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


async def test_a_format_has_no_effect_on_an_answer_of_calls(router: RouterHarness) -> None:
    more = {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": schema_format({"type": "string"}),
    }
    assert (await asked(router, CHAT, more)).status_code == 200
    assert sources(router) == [json.dumps({"$ref": "#/$defs/0", "$defs": {"0": CLOSED}})]
    both = await asked(router, CHAT, more | {"structured_outputs": {"regex": "a"}})
    assert both.json()["error"]["param"] == "structured_outputs"


async def test_a_format_leaves_room_for_calls(router: RouterHarness) -> None:
    more = {"tools": [FUNCTION], "response_format": schema_format(SCHEMA)}
    assert (await asked(router, CHAT, more)).status_code == 200
    (source,) = sources(router)
    assert "start: answer | calls" in source
    assert "<tool_call>" in source


async def test_schemas_are_joined_beside_the_event_loop(
    router: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    join = structured_output.guidance_with_calls

    def seen(*arguments: Any) -> Guidance | None:
        threads.append(threading.get_ident())
        return join(*arguments)

    monkeypatch.setattr(answer_format, "guidance_with_calls", seen)
    more = {"tools": [FUNCTION], "response_format": schema_format(SCHEMA)}
    assert (await asked(router, CHAT, more)).status_code == 200
    # The router of the test runs on this thread.
    assert threads
    assert threading.get_ident() not in threads


def sources(router: RouterHarness) -> list[str]:
    return [
        command.spec.sampling.guidance.source
        for server in router.workers.values()
        for command in server.worker.commands
        if isinstance(command, Prefill | RunLocal) and command.spec.sampling.guidance
    ]


@pytest.mark.parametrize("name", LARGE)
async def test_large_grammars_are_taken(router: RouterHarness, name: str) -> None:
    response = await asked(router, CHAT, LARGE[name])
    assert response.status_code == 200, response.text


def tool_named(name: str, part: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": part}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# What is wrong in a tool, and what the error says of it.
WRONG = {
    "keyword": ({"not": {}}, '"not" at get_x/properties/x cannot be followed'),
    "type": ({"type": "strng"}, '"type" at get_x/properties/x is unknown: strng'),
    "pointer": ({"$ref": "#/$defs/n"}, "Pointer 'get_x/$defs/n' does not exist"),
    "number": ({"$ref": "#/$defs/0"}, "Pointer 'get_x/$defs/0' does not exist"),
    "value": ({"type": "_0-x"}, '"type" at get_x/properties/x is unknown: _0-x'),
    "anchor": ({"$ref": "#here"}, "Anchor 'get_x#here' does not exist"),
    "document": ({"$ref": "a.json#/b"}, '"$ref" at get_x/properties/x is to another document'),
}


@pytest.mark.parametrize("path", ["required", "named", "beside a format"])
@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_in_a_tool_is_told_with_its_name(
    router: RouterHarness, name: str, path: str
) -> None:
    part, words = WRONG[name]
    more: dict[str, Any] = {"tools": [tool_named("good", {}), tool_named("get_x", part)]}
    match path:
        case "required":
            more["tool_choice"] = "required"
        case "named":
            more["tool_choice"] = {"type": "function", "function": {"name": "get_x"}}
        case _:
            more["response_format"] = schema_format(SCHEMA)
    response = await asked(router, CHAT, more)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"]
    assert "$defs/1" not in error["message"]
    assert "json-schema:" not in error["message"]
