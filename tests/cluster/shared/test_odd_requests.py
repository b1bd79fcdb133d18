"""A real cluster under requests that no client of ours would send: each is answered or refused with
a reason, by the types of the dialects' own clients, and the streams beside it do not change.

ODD_EXAMPLES sets how many requests each test makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.client_types import STREAMED, check_answer, check_error, check_stream
from support.dialect_bodies import DIALECTS
from support.odd_bodies import MODELS, SMALL, bodies, patterns, schemas, texts
from support.running_cluster import RunningCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

EXAMPLES = int(os.environ.get("ODD_EXAMPLES", "40"))
# Beyond which an answer counts as none at all.
HANG_S = 120
PROMPT = [2 + (7 * i) % 90 for i in range(90)]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
# 501 is for what kvrelay does not support.
REFUSED = (400, 403, 404, 413, 501)

Ask = Callable[[str, dict[str, Any]], httpx.Response]


async def attack(cluster: RunningCluster, strategy: st.SearchStrategy[Any], check: Any) -> None:
    """Calls check(ask, value) for EXAMPLES values, while other streams run and are compared."""

    def attacks() -> None:
        with httpx.Client(base_url=cluster.local.endpoints.http, timeout=HANG_S) as http:

            def ask(path: str, body: dict[str, Any]) -> httpx.Response:
                content = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                return http.post(path, content=content, headers=headers)

            @settings(
                max_examples=EXAMPLES,
                phases=[Phase.generate, Phase.shrink],
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def one(value: Any) -> None:
                check(ask, value)

            one()

    async def tokens() -> tuple[int, ...]:
        return (await cluster.client.generate(token_ids=PROMPT, **GREEDY).result()).token_ids

    expected, compared = await tokens(), 0
    attacking = asyncio.create_task(asyncio.to_thread(attacks))
    while not attacking.done():
        assert await asyncio.gather(tokens(), tokens()) == [expected] * 2
        compared += 1
    await attacking
    assert compared
    await cluster.settled()


def checked(path: str, response: httpx.Response) -> list[dict[str, Any]] | None:
    """The events of a stream, no events of a whole answer, or None if the request is refused."""
    if response.status_code != 200:
        assert response.status_code in REFUSED, (response.status_code, response.text[:500])
        check_error(path, response.text)
        return None
    if response.headers["content-type"].startswith("text/event-stream"):
        return check_stream(path, response.text)
    check_answer(path, response.text)
    return []


@pytest.mark.parametrize("path", MODELS)
async def test_each_field_over_its_range(cluster: RunningCluster, path: str) -> None:
    def check(ask: Ask, body: dict[str, Any]) -> None:
        checked(path, ask(path, body))

    streamed = st.just({"stream": True}) if path in STREAMED else st.just({})
    both = st.builds(dict.__or__, bodies(path), st.one_of(st.just({}), streamed))
    await attack(cluster, both, check)


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.sweep(3)
async def test_a_stream_says_what_the_whole_answer_says(cluster: RunningCluster, path: str) -> None:
    strategy, said, streamed = DIALECTS[path]

    def check(ask: Ask, body: dict[str, Any]) -> None:
        whole, stream = ask(path, body), ask(path, body | {"stream": True})
        assert whole.status_code == stream.status_code == 200, (whole.text, stream.text)
        assert checked(path, whole) == []
        events = checked(path, stream)
        assert events
        expected, found = said(whole.json()), streamed(events)
        if path == "/v1/messages":
            # A whole answer has as much of an input that was cut off as is complete.
            for block, other in zip(expected[0], found[0], strict=True):
                if other[3] is None:
                    block[3] = None
        assert found == expected

    await attack(cluster, strategy, check)


@pytest.mark.parametrize("place", ["structured_outputs", "response_format", "tools"])
async def test_an_accepted_schema_binds_the_answer(cluster: RunningCluster, place: str) -> None:
    path = "/v1/chat/completions"

    def options(schema: Any) -> dict[str, Any]:
        if place == "structured_outputs":
            return {"structured_outputs": {"json": schema}}
        if place == "response_format":
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        function = {"name": "f", "parameters": {"type": "object"} | schema}
        tools = [{"type": "function", "function": function}]
        return {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}

    def check(ask: Ask, value: tuple[Any, int]) -> None:
        schema, seed = value
        more = {"max_tokens": 200, "temperature": 1.5, "seed": seed}
        response = ask(path, SMALL[path] | more | options(schema))
        if checked(path, response) is None:
            return
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "length":
            return
        calls = choice["message"].get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
        answer = json.loads(text)
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            return
        # A reference to nothing that the grammar did not need.
        with_errors = jsonschema.Draft202012Validator(schema).iter_errors(answer)
        try:
            assert not [one.message for one in with_errors], text
        except jsonschema.exceptions._WrappedReferencingError:
            return

    await attack(cluster, st.tuples(schemas(), st.integers(0, 999)), check)


async def test_an_accepted_pattern_or_choice_binds_the_answer(cluster: RunningCluster) -> None:
    path = "/v1/completions"
    choices = st.lists(texts, min_size=1, max_size=5)

    def check(ask: Ask, given: tuple[str, Any, int]) -> None:
        name, value, seed = given
        more = {"max_tokens": 150, "temperature": 1.5, "seed": seed}
        response = ask(path, SMALL[path] | more | {"structured_outputs": {name: value}})
        if checked(path, response) is None:
            return
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "length":
            return
        if name == "choice":
            assert choice["text"] in value
            return
        try:
            found = re.compile(value).fullmatch(choice["text"])
        except (re.error, OverflowError):
            return
        # Both know other characters as digits and letters.
        assert found or not choice["text"].isascii(), choice["text"]

    options = st.one_of(
        st.tuples(st.just("regex"), patterns), st.tuples(st.just("choice"), choices)
    )
    await attack(
        cluster,
        st.builds(lambda one, seed: (*one, seed), options, st.integers(0, 999)),
        check,
    )


tokens_of_vocabulary = st.integers(0, 2047)


async def test_sampling_at_its_bounds(cluster: RunningCluster) -> None:
    path = "/v1/completions"

    def between(low: float, high: float) -> st.SearchStrategy[float]:
        return st.one_of(st.floats(low, high), st.sampled_from([low, high]))

    strategy = st.fixed_dictionaries(
        {"min_tokens": st.integers(0, 12), "stop_token_ids": st.lists(tokens_of_vocabulary)},
        optional={
            "temperature": st.one_of(between(0, 100), st.sampled_from([5e-324, 1e-30, 1e-5])),
            "top_p": st.one_of(between(5e-324, 1), st.sampled_from([1e-45, 1e-10])),
            "top_k": st.sampled_from([-1, 0, 1, 2047, 2048, 2**31 - 1]),
            "min_p": between(0, 1),
            "presence_penalty": between(-2, 2),
            "frequency_penalty": between(-2, 2),
            "repetition_penalty": between(0.01, 100),
            "seed": st.sampled_from([0, 2**32, 2**63 - 1]),
            "n": st.integers(1, 4),
            "logit_bias": st.dictionaries(
                tokens_of_vocabulary.map(str), st.sampled_from([-100, 100, 1e-320]), max_size=300
            ),
        },
    )

    def check(ask: Ask, options: dict[str, Any]) -> None:
        least = options["min_tokens"]
        count = {"max_tokens": 12, "logprobs": 20, "return_token_ids": True}
        response = ask(path, SMALL[path] | options | count | {"best_of": options.get("n", 1)})
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            given = choice["token_ids"]
            assert least <= len(given) <= 12
            stops = set(options["stop_token_ids"])
            assert stops.isdisjoint(given[: max(least - 1, 0)])
            assert all(-9999 <= one <= 0 for one in choice["logprobs"]["token_logprobs"])

    await attack(cluster, strategy, check)


async def test_texts_and_tokens_there_and_back(cluster: RunningCluster) -> None:
    def check(ask: Ask, value: str | list[int]) -> None:
        if isinstance(value, list):
            found = checked("/detokenize", ask("/detokenize", {"tokens": value}))
            assert (found is None) == any(not 0 <= one < 2048 for one in value)
            return
        body = {"prompt": value, "add_special_tokens": False, "return_token_strs": True}
        response = ask("/tokenize", body)
        if checked("/tokenize", response) is None:
            assert not value or "\0" in value
            return
        answer = response.json()
        assert len(answer["token_strs"]) == len(answer["tokens"]) == answer["count"]
        assert ask("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == value

    ids = st.one_of(tokens_of_vocabulary, st.integers(-(2**70), 2**70))
    await attack(cluster, st.one_of(texts, st.lists(ids, max_size=50)), check)
