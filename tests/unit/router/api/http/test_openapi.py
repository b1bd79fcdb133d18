"""The OpenAPI description says what the parser and the answers are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from support.router_harness import running_router

from kvrelay.errors import InvalidArgument
from router.api.http.dialects.anthropic.requests import parse_count_tokens, parse_messages
from router.api.http.dialects.openai.requests import parse_chat, parse_completion
from router.api.http.dialects.responses.requests import parse_response
from router.api.http.openapi import describe

DESCRIPTION = describe("1.2.3")


def schema(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DESCRIPTION["components"]}


def test_every_schema_is_one() -> None:
    for one in DESCRIPTION["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(one)


CHAT_BODY = {"messages": [{"role": "user", "content": "x"}]}
MESSAGES_BODY = CHAT_BODY | {"max_tokens": 4}


@pytest.mark.parametrize(
    ("parse", "body", "name"),
    [
        (parse_completion, {"prompt": "x"}, "CompletionRequest"),
        (parse_chat, CHAT_BODY, "ChatRequest"),
        (parse_messages, MESSAGES_BODY, "MessagesRequest"),
        (parse_count_tokens, CHAT_BODY, "CountTokensRequest"),
        (parse_response, {"input": "x"}, "ResponsesRequest"),
    ],
)
@pytest.mark.parametrize("wrong", [{"a": 1}, "text", [[]], 1.5, True])
def test_the_parser_takes_the_types_that_are_described(
    parse: Callable[[Any], object],
    body: dict[str, object],
    name: str,
    wrong: object,
) -> None:
    """A value that is not described is refused with the field's name; one that is, is not refused
    for its type.
    """
    components = DESCRIPTION["components"]
    for field, one in components["schemas"][name]["properties"].items():
        described = jsonschema.Draft202012Validator(one | {"components": components}).is_valid(
            wrong
        )
        refusal = _refusal(parse, body | {field: wrong})
        if described:
            assert not refusal.startswith(f"{field} is {wrong!r}; it must be")
        else:
            assert refusal.startswith(field), f"{field}: {wrong!r} gives {refusal!r}"


def _refusal(parse: Callable[[Any], object], body: dict[str, object]) -> str:
    try:
        parse(body)
    except InvalidArgument as error:
        return error.message
    return ""


async def test_answers_are_as_described() -> None:
    async with (
        running_router() as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as http,
    ):
        assert (await http.get("/openapi.json")).json()["paths"] == DESCRIPTION["paths"]
        prompt = {
            "prompt": "Once",
            "max_tokens": 4,
            "n": 2,
            "logprobs": 1,
            "return_token_ids": True,
        }
        for path, body, name in (
            ("/v1/completions", prompt, "Completion"),
            ("/v1/chat/completions", CHAT_BODY | {"max_tokens": 4, "logprobs": True}, "Chat"),
            ("/v1/messages", MESSAGES_BODY, "AnthropicMessage"),
            ("/v1/messages", CHAT_BODY, "AnthropicError"),
            ("/v1/messages/count_tokens", CHAT_BODY, "CountedTokens"),
            ("/v1/responses", {"input": "x", "max_output_tokens": 4}, "ModelResponse"),
            ("/v1/responses", {"input": 5}, "Error"),
            ("/tokenize", {"prompt": "Once", "return_token_strs": True}, "Tokens"),
            ("/detokenize", {"tokens": [9, 10]}, "Text"),
            ("/v1/completions", {"prompt": 5}, "Error"),
        ):
            found = (await http.post(path, json=body)).json()
            jsonschema.validate(found, schema(name), jsonschema.Draft202012Validator)
        for path, name in (
            ("/v1/models", "Models"),
            ("/v1/models/demo", "Model"),
            ("/v1/models/other", "Error"),
        ):
            jsonschema.validate(
                (await http.get(path)).json(), schema(name), jsonschema.Draft202012Validator
            )


async def test_a_get_request_takes_few_function_calls() -> None:
    """Anyone with a token may repeat it without end."""
    paths = [path for path, of in DESCRIPTION["paths"].items() if "get" in of and "{" not in path]
    calls = 0

    def see(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"

    async with running_router() as router, httpx.AsyncClient(base_url=router.http) as http:
        for path in [*paths, "/openapi.json", "/status.json", "/"]:
            assert (await http.get(path)).status_code == 200
            calls = 0
            sys.setprofile(see)
            try:
                await http.get(path)
            finally:
                sys.setprofile(None)
            assert 100 < calls < 10_000, path
