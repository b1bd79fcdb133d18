"""The HTTP endpoint: a real uvicorn server, asked by httpx."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect
from structlog.testing import capture_logs
from support.fake_worker import answer
from support.router_harness import DEMO, RouterHarness, running_router

import kvrelay
from kvrelay import sampling_limits
from kvrelay.tokenizer.tokenizer import Tokenizer
from router.api.http.connections.sending import EventStream
from router.api.http.dialects.openai.requests import parse_completion
from router.api.http.dialects.responses.requests import LOGPROBS
from router.frontend.tokenization import Text

PROMPT = list(range(10, 50))
SHORT = [11, 12, 13]
TOKENIZER = Tokenizer.load(DEMO)


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    async with running_router() as running:
        yield running


@pytest.fixture
async def http(router: RouterHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.http, timeout=60) as client:
        yield client


def body(prompt: object = PROMPT, **more: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 8,
        "seed": 7,
        "return_token_ids": True,
    } | more


async def events(
    http: httpx.AsyncClient, path: str, request: dict[str, Any]
) -> list[dict[str, Any]]:
    """All events of a stream; checks that it ends with [DONE]."""
    async with http.stream("POST", path, json=request | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-kvrelay-path"] in ("disaggregated", "local")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_completion(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=body())
    assert response.status_code == 200
    assert response.headers["x-kvrelay-path"] == "disaggregated"
    found = response.json()
    expected = answer(tuple(PROMPT), 7, 8)
    (choice,) = found["choices"]
    assert (found["object"], found["model"]) == ("text_completion", "demo")
    assert (choice["token_ids"], choice["text"]) == (expected, TOKENIZER.decode(expected))
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"] == {
        "prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    account = found["kvrelay"]
    assert account["path"] == "disaggregated"
    assert account["ledger"]["handoff"]["transport"] == "fake"
    assert sum(account["ledger"]["phases"].values()) == account["ledger"]["ttft_seconds"] > 0


async def test_streamed_completion(http: httpx.AsyncClient) -> None:
    chunks = await events(http, "/v1/completions", body())
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = answer(tuple(PROMPT), 7, 8)
    assert [one for choice in choices for one in choice["token_ids"]] == expected
    assert "".join(choice["text"] for choice in choices) == TOKENIZER.decode(expected)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert ["kvrelay" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "usage" not in chunks[-1]


async def test_stream_with_usage(http: httpx.AsyncClient) -> None:
    chunks = await events(http, "/v1/completions", body(stream_options={"include_usage": True}))
    last = chunks[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["kvrelay"]["why"].endswith("; prefill-0 is free first, 0 tokens queued")
    assert "kvrelay" not in chunks[-2]


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts(http: httpx.AsyncClient, streamed: bool) -> None:
    prompts = [PROMPT, SHORT, [*PROMPT, 60]]
    tokens: list[list[int]] = [[], [], []]
    if streamed:
        chunks = await events(http, "/v1/completions", body(prompts))
        for chunk in chunks:
            for choice in chunk["choices"]:
                tokens[choice["index"]] += choice["token_ids"]
        accounts = chunks[-1]["kvrelay"]
    else:
        found = (await http.post("/v1/completions", json=body(prompts))).json()
        tokens = [choice["token_ids"] for choice in found["choices"]]
        accounts = found["kvrelay"]
    assert tokens == [answer(tuple(one), 7, 8) for one in prompts]
    assert accounts[1]["path"] == "local"
    assert len({one["request_id"] for one in accounts}) == 3


async def test_text_prompt_and_logprobs(http: httpx.AsyncClient) -> None:
    request = body("Once upon a time", logprobs=2)
    (choice,) = (await http.post("/v1/completions", json=request)).json()["choices"]
    logprobs = choice["logprobs"]
    assert (
        len(logprobs["tokens"])
        == len(logprobs["token_logprobs"])
        == len(logprobs["text_offset"])
        == 8
    )
    assert logprobs["token_logprobs"][0] == -0.5
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    streamed = [
        chunk["choices"][0]["logprobs"] for chunk in await events(http, "/v1/completions", request)
    ]
    assert [one for part in streamed if part for one in part["tokens"]] == logprobs["tokens"]
    assert [one for part in streamed if part for one in part["text_offset"]] == logprobs[
        "text_offset"
    ]


async def test_chat(http: httpx.AsyncClient) -> None:
    request = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "seed": 7,
        "return_token_ids": True,
    }
    prompt = tuple(TOKENIZER.encode("<s><|user|>hello</s><|assistant|>", add_special_tokens=False))
    expected = answer(prompt, 7, 8)
    found = (
        await http.post(
            "/v1/chat/completions", json=request | {"logprobs": True, "top_logprobs": 1}
        )
    ).json()
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": TOKENIZER.decode(expected)}
    assert choice["token_ids"] == expected
    assert len(choice["logprobs"]["content"]) == 8
    chunks = await events(http, "/v1/chat/completions", request)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == TOKENIZER.decode(expected)
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_disconnect_of_a_stream_frees_the_workers(
    router: RouterHarness, http: httpx.AsyncClient
) -> None:
    async with http.stream(
        "POST", "/v1/completions", json=body(max_tokens=4000, stream=True)
    ) as response:
        await anext(response.aiter_lines())
    await freed(router)


async def test_disconnect_while_waiting_frees_the_workers(
    router: RouterHarness, http: httpx.AsyncClient
) -> None:
    router.workers["decode-0"].may_step.clear()
    for streamed in (False, True):
        asking = asyncio.create_task(
            http.post("/v1/completions", json=body(SHORT, stream=streamed))
        )
        async with asyncio.timeout(60):
            while not router.workers["decode-0"].worker.sequences:
                await asyncio.sleep(0.005)
        asking.cancel()
        await freed(router)


async def freed(router: RouterHarness) -> None:
    async with asyncio.timeout(60):
        while any(one.worker.sequences or one.worker.prompts for one in router.workers.values()):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        (body(n=10**9), 400, "n"),
        (body(n=0), 400, "n"),
        (body(""), 400, "prompt"),
        (body("a", stop=["b\0"]), 400, "stop"),
        (body([2**63]), 400, "prompt"),
        (body(max_tokens=-1), 400, "max_tokens"),
        (body(top_p=0), 400, "top_p"),
        (body(logprobs=21), 400, "logprobs"),
        (body(logit_bias={"5": 1e6}), 400, "logit_bias"),
        (body(logit_bias={str(one): 1 for one in range(301)}), 400, "logit_bias"),
        (body(stop=["x"] * 10**4), 400, "stop"),
        (body(stop=[""]), 400, "stop"),
        (body(request_id="a\r\nb"), 400, "request_id"),
        (body(request_id="x" * 10_000), 400, "request_id"),
        (body(chat_template="{{ 7 }}"), 403, "chat_template"),
        (body(temperature=-1), 400, "temperature"),
        (body([]), 400, "prompt"),
        (body([5000]), 400, "prompt"),
        (body([SHORT, [5000]]), 400, "prompt"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(max_tokens=9999), 400, "max_tokens"),
        (body(model="gpt-9"), 404, "model"),
        (body(kv_transfer_params={}), 403, "kv_transfer_params"),
        (body(prompt_embeds="x"), 501, "prompt_embeds"),
        (body("\ud800"), 400, "prompt"),
        (body() | {"\ud800": 1}, 400, None),
        (body(request_id=" a"), 400, "request_id"),
        (body(request_id="a "), 400, "request_id"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.sweep(3)
async def test_errors_in_openais_shape(
    router: RouterHarness,
    http: httpx.AsyncClient,
    request_: dict[str, Any],
    status: int,
    param: str,
    streamed: bool,
) -> None:
    content = json.dumps(request_ | {"stream": streamed})
    response = await http.post("/v1/completions", content=content)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param)
    assert error["message"]
    assert error["type"]
    await freed(router)


@pytest.mark.parametrize("role", ["user", "half \ud83d"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_messages_that_are_not_unicode(http: httpx.AsyncClient, path: str, role: str) -> None:
    message = {"role": role, "content": "hello" if role != "user" else "\ud800"}
    response = await http.post(path, content=json.dumps({"messages": [message]}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def chunked(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not told."""
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


async def test_bodies_that_cannot_be_read(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/completions", content=b"{")).status_code == 400
    assert (await http.post("/v1/completions", content=b"[" * 10**5)).status_code == 400
    too_large = b" " * (4 * 2**20 + 1)
    assert (await http.post("/v1/completions", content=too_large)).status_code == 413
    assert (await http.post("/v1/completions", content=chunked(too_large))).status_code == 413
    bomb = gzip.compress(b" " * 10**7)
    assert (
        await http.post("/v1/completions", content=bomb, headers={"content-encoding": "gzip"})
    ).status_code == 415
    wrong = await http.get("/v1/completions", headers={"x-request-id": "mine"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (405, "mine")
    missing = await http.get("/no/such/path", headers={"x-request-id": "é".encode()})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    assert missing.headers["x-request-id"].isalnum()
    foreign = await http.get("/v1/messages", headers={"x-request-id": "mine"})
    assert (foreign.status_code, foreign.headers["request-id"]) == (405, "mine")


_CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "request_", "param"),
    [
        ("chat/completions", _CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", _CHAT | {"max_completion_tokens": 9999}, "max_completion_tokens"),
        ("chat/completions", _CHAT | {"max_tokens": 9999}, "max_tokens"),
        ("responses", {"input": "x" * 20_000}, "input"),
        ("responses", {"input": "x", "include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ("responses", {"input": "x", "metadata": dict.fromkeys(map(str, range(17)))}, "metadata"),
        ("completions", {"prompt": "x", "slo": {"ttft": 1}}, "slo"),
    ],
)
async def test_errors_name_the_field_of_the_dialect(
    http: httpx.AsyncClient, path: str, request_: dict[str, Any], param: str
) -> None:
    response = await http.post(f"/v1/{path}", json=request_)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param), error


async def test_a_name_in_quotes_is_the_clients(http: httpx.AsyncClient) -> None:
    """The field `guidance` is called response_format here."""
    request = _CHAT | {"model": "acme/guidance-7b", "response_format": {"type": "json_object"}}
    response = await http.post("/v1/chat/completions", json=request)
    assert response.status_code == 404
    assert "acme/guidance-7b" in response.json()["error"]["message"]


async def test_too_many_scores_name_the_fields_of_the_dialect(http: httpx.AsyncClient) -> None:
    many = {"input": "x", "include": [LOGPROBS], "top_logprobs": 20, "max_output_tokens": 200_000}
    error = (await http.post("/v1/responses", json=many)).json()["error"]
    assert error["param"] == "top_logprobs"
    assert "max_output_tokens or top_logprobs" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "user": NaN}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
    ],
)
async def test_bodies_that_are_not_clean_json(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post("/v1/completions", content=content)
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )


async def test_a_byte_order_mark_is_told(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a"}')
    assert "byte order mark" in response.json()["error"]["message"]


async def test_a_prompt_may_have_nul(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=body("a\0b"))
    asked = await http.post("/tokenize", json={"prompt": "a\0b"})
    assert response.json()["usage"]["prompt_tokens"] == asked.json()["count"]


async def test_the_type_of_a_value_is_no_part_of_its_place(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=body(structured_outputs={"json": 5}))
    assert response.json()["error"]["message"].startswith("structured_outputs.json is 5; it must")


async def test_methods(http: httpx.AsyncClient) -> None:
    head = await http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    options = await http.options("/v1/completions")
    assert (options.status_code, options.headers["allow"]) == (405, "POST")
    assert options.json()["error"]["code"] == 405


async def test_request_ids(http: httpx.AsyncClient) -> None:
    given = await http.post("/v1/completions", json=body(), headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "cmpl-mine-1"
    assert given.json()["kvrelay"]["request_id"] == "mine-1"
    in_body = await http.post(
        "/v1/completions", json=body(request_id="mine-2"), headers={"x-request-id": "other"}
    )
    assert in_body.headers["x-request-id"] == "mine-2"
    made = await http.post("/v1/completions", json=body())
    assert made.json()["id"] == "cmpl-" + made.headers["x-request-id"]
    wrong = await http.post("/v1/completions", json=body(n=0), headers={"x-request-id": "mine-3"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "mine-3")
    unfit = await http.post("/v1/completions", json=body(), headers={"x-request-id": "x" * 129})
    assert (unfit.status_code, unfit.json()["error"]["param"]) == (400, "request_id")
    assert len(unfit.headers["x-request-id"]) == 32
    longest = {"x-request-id": "x" * 128}
    several = await http.post("/v1/completions", json=body([SHORT, PROMPT], n=2), headers=longest)
    assert (several.status_code, several.headers["x-request-id"]) == (200, "x" * 128)
    assert len({one["request_id"] for one in several.json()["kvrelay"]}) == 4


async def test_unexpected_errors_keep_their_reason_in_the_log(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("router.frontend.frontend.Frontend.tokenize", broken)
    with capture_logs() as lines:
        response = await http.post(
            "/v1/completions", json=body(), headers={"x-request-id": "unlucky"}
        )
    assert (response.status_code, response.headers["x-request-id"]) == (500, "unlucky")
    assert response.json()["error"]["type"] == "internal_error"
    assert "unlucky" in response.json()["error"]["message"]
    assert "secret" not in response.text
    assert [line["request"] for line in lines if line.get("exc_info")] == ["unlucky"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_n_choices(http: httpx.AsyncClient, streamed: bool) -> None:
    request = body([PROMPT, SHORT], n=2)
    expected = [
        answer(tuple(one.token_ids), one.sampling.seed or 0, 8)
        for one in parse_completion(request).requests
    ]
    tokens: list[list[int]] = [[], [], [], []]
    if streamed:
        chunks = await events(
            http, "/v1/completions", request | {"stream_options": {"include_usage": True}}
        )
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for chunk in chunks:
            for choice in chunk["choices"]:
                tokens[choice["index"]] += choice["token_ids"]
        usage = chunks[-1]["usage"]
    else:
        found = (await http.post("/v1/completions", json=request)).json()
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        tokens = [choice["token_ids"] for choice in found["choices"]]
        usage = found["usage"]
    assert tokens == expected
    assert tokens[0] != tokens[1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT) + len(SHORT), 32)


async def test_more_choices_than_the_queue_holds_are_told_as_such() -> None:
    async with (
        running_router(max_queue=2) as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as client,
    ):
        await router.kill("decode-0")
        async with asyncio.timeout(60):
            while (await client.get("/health")).status_code != 503:
                await asyncio.sleep(0.02)
        found = await client.post("/v1/completions", json=body(n=5, best_of=5))
    assert found.status_code == 429
    assert found.json()["error"]["message"] == (
        "choice 3 of 5: the queue is full with 2 requests; retry later, or ask for fewer choices"
    )


async def test_the_choices_of_a_prompt_tokenize_it_once(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = Text.encode

    async def counted(self: Text, text: str, **more: Any) -> tuple[int, ...]:
        encoded.append(text)
        return await encode(self, text, **more)

    monkeypatch.setattr(Text, "encode", counted)
    assert (await http.post("/v1/completions", json=body(["one", "two"], n=3))).status_code == 200
    assert encoded == ["one", "two"]


@pytest.mark.parametrize("field", ["echo", "logprobs"])
async def test_texts_that_a_model_without_a_tokenizer_cannot_give(
    router: RouterHarness, http: httpx.AsyncClient, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Text, "has_tokenizer", False)
    response = await http.post(
        "/v1/completions", json=body(**{field: 1 if field == "logprobs" else True})
    )
    assert (response.status_code, response.json()["error"]["param"]) == (404, field)
    assert not any(one.worker.commands for one in router.workers.values())


async def test_an_error_of_any_kind_in_a_stream_reaches_its_reader(
    router: RouterHarness, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.runtime.stream.Stream.take", broken)
    with capture_logs() as lines:
        assert (await http.post("/v1/completions", json=body())).status_code == 500
        (error,) = await events(http, "/v1/completions", body())
    assert error["error"]["code"] == 500
    assert [line["event"] for line in lines if "unexpected" in line["event"]] == [
        "unexpected_error"
    ] * 2
    await freed(router)


async def test_a_stream_whose_start_cannot_be_sent_is_cancelled() -> None:
    class Recorded:
        path = "local"
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    async def events() -> AsyncIterator[str]:
        yield "never asked for"

    async def lost(message: object) -> None:
        raise OSError("the connection is gone")

    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    choices = Recorded()
    response = EventStream(choices, events())  # type: ignore[arg-type]
    with pytest.raises((OSError, ClientDisconnect)):
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, lost)  # type: ignore[arg-type]
    assert choices.cancelled


async def test_echo(http: httpx.AsyncClient) -> None:
    for prompt, text in (
        ("Once upon a time", "Once upon a time"),
        (PROMPT, TOKENIZER.decode(PROMPT)),
    ):
        plain = (await http.post("/v1/completions", json=body(prompt))).json()["choices"][0]["text"]
        echoed = (await http.post("/v1/completions", json=body(prompt, echo=True, n=2))).json()[
            "choices"
        ]
        assert echoed[0]["text"] == text + plain
        assert echoed[1]["text"].startswith(text)
        chunks = await events(http, "/v1/completions", body(prompt, echo=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text + plain


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("words", [1, 3, 400])
async def test_echo_with_logprobs_scores_the_prompt_too(
    http: httpx.AsyncClient, count: int, words: int
) -> None:
    """As a tool for evaluations asks for it, with several prompts and a single new token."""
    prompts = ["Once upon a time", "x " * words]
    request = body(prompts, echo=True, logprobs=count, n=2, max_tokens=3)
    choices = (await http.post("/v1/completions", json=request)).json()["choices"]
    assert len(choices) == 4
    for number, choice in enumerate(choices):
        prompt = TOKENIZER.encode(prompts[number // 2])
        scores = choice["logprobs"]
        assert {len(values) for values in scores.values()} == {len(prompt) + 3}
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        later = scores["token_logprobs"][1 : len(prompt)]
        assert later == pytest.approx([-0.1 * place for place in range(1, len(prompt))], rel=1e-5)
        assert scores["token_logprobs"][len(prompt) :] == [-0.5] * 3
        for top, own in zip(scores["top_logprobs"][1 : len(prompt)], later, strict=True):
            assert max(top.values(), default=own) == own
        assert scores["tokens"][0] == "<s>", "a special token has its name, and no text"
        for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
            assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    for n, prompt_text in ((1, prompts[1]), (1, PROMPT)):
        one = body(prompt_text, echo=True, logprobs=count, n=n, max_tokens=3)
        whole = (await http.post("/v1/completions", json=one)).json()["choices"][0]
        parts = [
            chunk["choices"][0]["logprobs"] for chunk in await events(http, "/v1/completions", one)
        ]
        for name, values in whole["logprobs"].items():
            assert [value for part in parts if part for value in part[name]] == values


async def test_logprobs_of_a_prompt_that_is_too_long_name_the_clients_field(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_limits, "MAX_PROMPT_LOGPROBS", 20)
    request = body("Once upon a time", echo=True, logprobs=5, max_tokens=1)
    response = await http.post("/v1/completions", json=request)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert "allowed are 20" in response.json()["error"]["message"]


async def test_usage_in_each_chunk(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(http, "/v1/completions", body(stream_options=options))
    counted = 0
    for chunk in chunks[:-1]:
        counted += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["prompt_tokens"] == len(PROMPT)
        assert chunk["usage"]["completion_tokens"] == counted
    assert chunks[-1]["usage"]["completion_tokens"] == counted == 8


async def test_headers_of_a_stream(http: httpx.AsyncClient) -> None:
    async with http.stream(
        "POST", "/v1/completions", json=body(stream=True, request_id="s-1")
    ) as response:
        await response.aread()
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "s-1"


async def test_retry_after(router: RouterHarness, http: httpx.AsyncClient) -> None:
    router.workers["decode-0"].may_step.clear()
    flying = asyncio.create_task(http.post("/v1/completions", json=body(SHORT)))
    async with asyncio.timeout(60):
        while not router.workers["decode-0"].worker.sequences:
            await asyncio.sleep(0.005)
    router.stop()
    async with asyncio.timeout(60):
        while (response := await http.post("/v1/completions", json=body(SHORT))).status_code != 503:
            await asyncio.sleep(0.02)
    assert int(response.headers["retry-after"]) >= 1
    assert (await http.get("/health")).status_code == 503
    router.workers["decode-0"].may_step.set()
    assert (await flying).status_code == 200


async def test_models_health_and_tokens(http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", 4096)
    assert (await http.get("/v1/models/demo")).json() == model
    missing = await http.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert (await http.get("/version")).json() == {"version": kvrelay.__version__}
    health = await http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})
    tokens = (await http.post("/tokenize", json={"prompt": "Once upon"})).json()
    assert tokens == {
        "count": len(tokens["tokens"]),
        "max_model_len": 4096,
        "tokens": TOKENIZER.encode("Once upon"),
    }
    spelt = (
        await http.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True})
    ).json()
    assert len(spelt["token_strs"]) == spelt["count"]
    assert spelt["token_strs"] == ["<s>", "Once", "Ġupon"]
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "Once upon"}
    chat = (
        await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    ).json()
    assert chat["tokens"] == TOKENIZER.encode(
        "<s><|user|>hi</s><|assistant|>", add_special_tokens=False
    )
    for path, bad in (
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [9999]}),
    ):
        assert (await http.post(path, json=bad)).status_code == 400


async def test_health_without_a_decode_worker(
    router: RouterHarness, http: httpx.AsyncClient
) -> None:
    await router.kill("decode-0")
    async with asyncio.timeout(60):
        while (await http.get("/health")).status_code != 503:
            await asyncio.sleep(0.02)


async def test_metrics(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=body())
    await http.post("/v1/completions", json=body(SHORT))
    text = (await http.get("/metrics")).text
    for line in (
        'kvrelay_request_success_total{finished_reason="length",model_name="demo"} 2.0',
        'kvrelay_path_decision_total{model_name="demo",path="disaggregated",why="least_loaded"} '
        "1.0",
        'kvrelay_path_decision_total{model_name="demo",path="local",why="short_prompt"} 1.0',
        'kvrelay_prompt_tokens_total{model_name="demo"} 43.0',
        'kvrelay_generation_tokens_total{model_name="demo"} 16.0',
        'kvrelay_time_to_first_token_seconds_count{model_name="demo"} 2.0',
        'kvrelay_inter_token_latency_seconds_count{model_name="demo"} 14.0',
        'kvrelay_handoff_seconds_count{model_name="demo"} 1.0',
        'kvrelay_handoff_bytes_total{model_name="demo"} 64.0',
        'kvrelay_num_requests_running{model_name="demo",pool="decode",worker="decode-0"} 0.0',
        "kvrelay_spec_decode_num_draft_tokens_total"
        '{model_name="demo",pool="decode",worker="decode-0"} 0.0',
        "kvrelay_spec_decode_num_accepted_tokens_total"
        '{model_name="demo",pool="decode",worker="decode-0"} 0.0',
        'kvrelay_pool_replicas{model_name="demo",pool="decode",state="ready"} 1.0',
    ):
        assert line in text
