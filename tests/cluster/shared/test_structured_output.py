"""Answers that follow a schema, through a real cluster with the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from support.running_cluster import RunningCluster, until_a_fault_hits

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
NUMBERS = range(250, 300)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": NUMBERS[0],
            "maxItems": NUMBERS[-1],
        },
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["title", "numbers", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMA}}
# Makes the prompt long, whatever other tests of the cluster have left in its caches.
DESCRIPTION = "".join(f"A note has a title and some numbers, says rule {n}. " for n in range(12))
# By path.
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"response_format": FORMAT},
    "disaggregated": {
        "tools": [
            {
                "type": "function",
                "function": {"name": "note", "description": DESCRIPTION, "parameters": SCHEMA},
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
ENDS = {"local": "stop", "disaggregated": "tool_calls"}


@pytest_asyncio.fixture(loop_scope="session")
async def client(cluster: RunningCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"{cluster.local.endpoints.http}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def asked(path: str, question: str = "Write a note.") -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": 3000,
    } | OPTIONS[path]


def text_of(message: Any) -> str:
    """The content, or the arguments of the call; of a whole message or a delta."""
    calls = message.tool_calls
    return (calls[0].function.arguments if calls else message.content) or ""


def check(text: str) -> None:
    note = json.loads(text)
    assert note.keys() == {"title", "numbers", "kind"}
    assert len(note["title"]) <= 30
    assert len(note["numbers"]) in NUMBERS
    assert all(one in range(100) for one in note["numbers"])
    assert note["kind"] in ("a", "b")


@pytest.mark.parametrize("path", OPTIONS)
@pytest.mark.sweep(2)
async def test_an_answer_that_follows_a_schema_outlives_its_decode_worker(
    cluster: RunningCluster, client: openai.AsyncOpenAI, path: str
) -> None:
    await cluster.settled()
    whole = await client.chat.completions.create(**asked(path))
    (choice,) = whole.choices
    assert choice.finish_reason == ENDS[path]
    check(text_of(choice.message))
    assert whole.model_extra is not None
    assert whole.model_extra["kvrelay"]["path"] == path
    await cluster.settled()

    async def attempts() -> int:
        text, finish, killed = "", None, False
        account: dict[str, Any] = {}
        async with await client.chat.completions.create(**asked(path), stream=True) as stream:
            async for chunk in stream:
                (one,) = chunk.choices
                finish = one.finish_reason or finish
                text += text_of(one.delta)
                account = (chunk.model_extra or {}).get("kvrelay", account)
                if text and not killed:
                    await cluster.kill_a_busy_decode_worker()
                    killed = True
        assert (text, finish) == (text_of(choice.message), ENDS[path])
        await cluster.settled()
        return len(account["ledger"]["attempts"])

    await until_a_fault_hits(attempts)


@pytest.mark.long
async def test_answers_side_by_side_are_the_answers_alone(
    cluster: RunningCluster, client: openai.AsyncOpenAI
) -> None:
    await cluster.settled()

    async def answer(path: str, question: str) -> str:
        found = await client.chat.completions.create(**asked(path, question))
        return text_of(found.choices[0].message)

    questions = [(path, f"Write note {number}.") for number in range(2) for path in OPTIONS]
    together = await asyncio.gather(*(answer(*one) for one in questions))
    for one in together:
        check(one)
    assert together == [await answer(*one) for one in questions]
