"""Errors name a field as the client sent it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.router_harness import running_router

from kvrelay.errors import InvalidArgument
from router.api.http.dialects.openai.requests import parse_completion


def schema(schema: dict[str, Any], **fields: object) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = [{"role": "user", "content": "x"}]
    return {"messages": chat, "response_format": wanted} | fields


def outputs(**fields: object) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": fields}


LOOK_AHEAD = {"properties": {"guidance": {"type": "string", "pattern": "(?=guidance: a)b"}}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown token": ("prompt", {"prompt": [99999]}),
    "an unknown token of several prompts": ("prompt", {"prompt": [[5], [5, -1]]}),
    "too many tokens": ("prompt", {"prompt": [5] * 5000}),
    "a pattern": ("response_format", schema(LOOK_AHEAD)),
    "a keyword": ("response_format", schema({"not": {"type": "string"}})),
    "a reference": ("response_format", schema({"$ref": "http://x/y"})),
    "a large schema": ("response_format", schema({"enum": ["x" * 70000]})),
    "min_tokens": ("min_tokens", schema({"type": "object"}, min_tokens=9)),
    "ignore_eos": ("ignore_eos", outputs(regex="a") | {"ignore_eos": True}),
    "an expression": ("structured_outputs", outputs(regex="(")),
    "a grammar": ("structured_outputs", outputs(grammar="(")),
}


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), ([False], "false"), ([[1], None], "null")]
)
def test_values_are_shown_as_json(value: object, shown: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^prompt\S* is {shown}; it must be "):
        parse_completion({"model": "demo", "prompt": value})


@pytest.mark.parametrize(("field", "body"), CASES.values(), ids=CASES)
async def test_in_the_message_and_in_param(field: str, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        running_router() as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as http,
    ):
        answer = await http.post(path, json={"model": "demo"} | body)
    error = answer.json()["error"]
    if body.get("prompt") == [[5], [5, -1]]:
        assert error["message"].startswith("prompt[1][1] is -1; ")
    assert answer.status_code == 400, error
    assert error["param"] == field
    own = error["message"].partition(": ")[0]
    assert field in own
    for name in ("guidance", "token_ids", "prompt_logprobs"):
        assert name not in own
