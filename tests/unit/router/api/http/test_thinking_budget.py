"""The thinking budget that workers get, for each dialect, model and tenant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chat_models import THINKING, demo_with, says
from support.router_harness import RouterHarness, running_router
from support.thinking_model import BEGIN, END, thinking_model

from kvrelay.client import AsyncClient
from kvrelay.config.tokens_file import digest_of
from kvrelay.types.requests import SamplingParams, ThinkingMarkers
from kvrelay.worker_messages import Prefill, RunLocal

QUESTION = [{"role": "user", "content": "Rain?"}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "Rain?"},
    MESSAGES: {"messages": QUESTION, "max_tokens": 8},
}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


async def asked(
    router: RouterHarness, path: str, more: Mapping[str, Any], token: str = ""
) -> SamplingParams | dict[str, Any]:
    """The sampling parameters that a worker got, or the error of the answer."""
    says(router, "It rains.")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=router.http, headers=headers, timeout=60) as http:
        response = await http.post(path, json={**BODIES[path], **more})
    found: dict[str, Any] = response.json()
    if response.status_code != 200:
        return found
    *_, last = (
        command.spec.sampling
        for server in router.workers.values()
        for command in server.worker.commands
        if isinstance(command, Prefill | RunLocal)
    )
    return last


@pytest.mark.parametrize(
    ("path", "more", "budget", "begin"),
    [
        (CHAT, {"thinking_token_budget": 7}, 7, BEGIN),
        (CHAT, {"thinking_token_budget": 0} | THINKS, 0, None),
        (COMPLETIONS, {"thinking_token_budget": 5}, 5, BEGIN),
        (COMPLETIONS, {"thinking_token_budget": 5, "prompt": "Rain?<think>\n"}, 5, None),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, 9, None),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2**40}}, 2**31 - 1, None),
    ],
)
@pytest.mark.sweep(3)
async def test_workers_get_budget_and_markers(
    tmp_path: Path, path: str, more: dict[str, Any], budget: int, begin: int | None
) -> None:
    async with running_router(folder=thinking_model(tmp_path)) as router:
        found = await asked(router, path, more)
    assert isinstance(found, SamplingParams), found
    assert found.thinking_token_budget == budget
    assert found.thinking == ThinkingMarkers(begin, END)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}),
        (CHAT, {"thinking_token_budget": -1}),
        (CHAT, {"thinking_token_budget": None}),
        # An answer that follows a grammar does not think.
        (CHAT, {"thinking_token_budget": 7, "response_format": {"type": "json_object"}}),
        (MESSAGES, {"thinking": {"type": "adaptive"}}),
        (MESSAGES, {"thinking": {"type": "disabled", "budget_tokens": 3}}),
    ],
)
@pytest.mark.sweep(3)
async def test_workers_get_none(tmp_path: Path, path: str, more: dict[str, Any]) -> None:
    async with running_router(folder=thinking_model(tmp_path)) as router:
        found = await asked(router, path, more)
    assert isinstance(found, SamplingParams), found
    assert (found.thinking_token_budget, found.thinking) == (None, None)


async def test_a_model_whose_thinking_cannot_be_ended(tmp_path: Path) -> None:
    async with running_router(folder=demo_with(THINKING, tmp_path)) as router:
        refused = await asked(router, CHAT, {"thinking_token_budget": 7})
        assert isinstance(refused, dict)
        assert refused["error"]["param"] == "thinking_token_budget"
        assert "leave thinking_token_budget out" in refused["error"]["message"]
        # Agents send it to every model.
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 9}}
        found = await asked(router, MESSAGES, thinking)
    assert isinstance(found, SamplingParams), found
    assert found.thinking_token_budget is None


@pytest.mark.parametrize("value", [-2, 2**31, 1.5, "many", [1]])
async def test_other_budgets_are_refused(tmp_path: Path, value: object) -> None:
    async with running_router(folder=thinking_model(tmp_path)) as router:
        refused = await asked(router, CHAT, {"thinking_token_budget": value})
    assert isinstance(refused, dict)
    assert refused["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize(("more", "budget"), [({}, 20), ({"thinking_token_budget": 7}, 7)])
@pytest.mark.parametrize("limit", [20, 3])
async def test_a_tenants_limit_bounds_the_budget(
    tmp_path: Path, more: dict[str, Any], budget: int, limit: int
) -> None:
    tokens_file = tmp_path / "tokens.yaml"
    tenant = {
        "name": "acme",
        "tokens_sha256": [digest_of("secret" * 8)],
        "max_reasoning_tokens": limit,
    }
    tokens_file.write_text(json.dumps({"tenants": [tenant]}))
    model = thinking_model(tmp_path)
    async with running_router(folder=model, tokens_file=tokens_file) as router:
        found = await asked(router, CHAT, more, "secret" * 8)
    assert isinstance(found, SamplingParams), found
    assert found.thinking_token_budget == min(budget, limit)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("answer", "thought"),
    [
        ([BEGIN, 70, 71, 72, END, 73, 74], 3),
        # The thinking does not end.
        ([BEGIN, 70, 71, 72, 73], 4),
        ([70, 71, 72, 73], 0),
        # A marker after text is text.
        ([70, 71, 72, 73, BEGIN, 74, END], 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_and_metrics_count_the_thinking(
    tmp_path: Path, answer: list[int], thought: int, stream: bool
) -> None:
    async with running_router(folder=thinking_model(tmp_path)) as router:
        router.say(answer)
        body = {**BODIES[CHAT], "stream": stream, "stream_options": {"include_usage": True}}
        if not stream:
            del body["stream_options"]
        async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
            text = (await http.post(CHAT, json=body)).text
            metrics = (await http.get("/metrics")).text
        async with AsyncClient(router.grpc) as client:
            router.say(answer)
            completion = await client.generate(messages=QUESTION).result()
    if stream:
        *_, text, _ = text.replace("data: ", "").split("\n\n")[:-1]
    usage = json.loads(text)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert completion.usage.reasoning_tokens == thought
    assert f'kvrelay_reasoning_tokens_total{{model_name="demo"}} {thought}' in metrics


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"structured_outputs": {"regex": "[a-z]*"}, "thinking_token_budget": 2}),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}),
    ],
)
async def test_of_an_answer_that_follows_a_grammar_nothing_is_thinking(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    """Although its prompt ends within the thinking."""
    async with running_router(folder=thinking_model(tmp_path)) as router:
        for thought in (0, 4):
            router.say([70, 71, 72, 73])
            body = {**BODIES[path], **(THINKS if path == CHAT else {}), **more}
            if thought:
                for name in ("response_format", "structured_outputs"):
                    body.pop(name, None)
            async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
                usage = (await http.post(path, json=body)).json()["usage"]
            assert usage["completion_tokens"] == 4
            assert usage["completion_tokens_details"]["reasoning_tokens"] == thought


async def test_the_kv_of_thinking_is_shown_while_it_is_held(tmp_path: Path) -> None:
    async def shown(http: httpx.AsyncClient) -> float:
        text = (await http.get("/metrics")).text
        (line,) = [
            one for one in text.splitlines() if one.startswith("kvrelay_reasoning_kv_bytes{")
        ]
        assert 'pool="decode",worker="decode-0"' in line
        return float(line.rpartition(" ")[2])

    async with running_router(folder=thinking_model(tmp_path)) as router:
        router.say([BEGIN, *[70] * 3000])
        for server in router.workers.values():
            server.pace_s = 0.01  # longer than the test
        async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
            assert await shown(http) == 0
            body = {**BODIES[CHAT], "stream": True}
            async with http.stream("POST", CHAT, json=body) as answer, asyncio.timeout(60):
                lines = answer.aiter_lines()
                while "reasoning" not in await anext(lines):
                    pass
                while not (held := await shown(http)):
                    await asyncio.sleep(0.05)
                assert held % 4 == 0, "bytes of a token in the fake worker"
            async with asyncio.timeout(60):
                while await shown(http):
                    await asyncio.sleep(0.05)
