"""The HTTP door, in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvrelay.clock import Clock
from kvrelay.errors import Cancelled, Code, InvalidArgument, KvRelayError
from router.choices import Choices
from router.driver import Driver
from router.intake import Intake
from router.metrics import Metrics
from router.openai_request import Completion, Json, load_json, parse_chat, parse_completion, parse_messages
from router.openai_response import Shape, account, error_body
from router.validation import check_model, check_text, check_token_ids

MAX_BODY_BYTES = 4 * 2**20
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def build_app(intake: Intake, driver: Driver, metrics: Metrics, clock: Clock) -> Starlette:
    door = OpenAiDoor(intake, driver, metrics, clock)
    routes = [
        Route("/v1/models", _typed(door.models), methods=["GET"]),
        Route("/v1/completions", _typed(door.completions), methods=["POST"]),
        Route("/v1/chat/completions", _typed(door.chat), methods=["POST"]),
        Route("/tokenize", _typed(door.tokenize), methods=["POST"]),
        Route("/detokenize", _typed(door.detokenize), methods=["POST"]),
        Route("/health", _typed(door.health), methods=["GET"]),
        Route("/metrics", _typed(door.metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class OpenAiDoor:
    def __init__(self, intake: Intake, driver: Driver, metrics: Metrics, clock: Clock) -> None:
        self._intake = intake
        self._driver = driver
        self._metrics = metrics
        self._clock = clock
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        arrival = self._clock.now()
        return await self._generate(request, parse_completion(await _read(request)), arrival)

    async def chat(self, request: Request) -> Response:
        arrival = self._clock.now()
        return await self._generate(request, parse_chat(await _read(request)), arrival)

    async def models(self, request: Request) -> Response:
        card = {
            "id": self._intake.card.info.id,
            "object": "model",
            "created": self._started,
            "owned_by": "kvrelay",
            "max_model_len": self._intake.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        body = await _read(request)
        check_model(str(body.get("model") or ""), self._intake.card)
        if "messages" in body:
            tokens = await self._intake.text.encode_chat(parse_messages(body["messages"]))
        else:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise InvalidArgument("prompt must be text", field="prompt")
            check_text("prompt", text)
            tokens = await self._intake.text.encode(text, body.get("add_special_tokens") is not False)
        return JSONResponse({"count": len(tokens), "max_model_len": self._intake.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await _read(request)
        check_model(str(body.get("model") or ""), self._intake.card)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            raise InvalidArgument("tokens must be a list of integers", field="tokens")
        check_token_ids("tokens", tokens, self._intake.card)
        return JSONResponse({"prompt": await self._intake.text.decode(tokens)})

    async def health(self, request: Request) -> Response:
        state = self._driver.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _generate(self, request: Request, completion: Completion, arrival: float) -> Response:
        shape = Shape(
            completion,
            id=("chatcmpl-" if completion.chat else "cmpl-") + uuid.uuid4().hex,
            created=int(time.time()),
            model=self._intake.card.info.id,
        )
        choices = await Choices.open(self._intake, completion, arrival)
        try:
            if not completion.stream:
                answers, logprobs = await _unless_gone(request, choices.whole())
                return JSONResponse(shape.whole(answers, logprobs), headers={"x-kvrelay-path": answers[0].path or ""})
            await _unless_gone(request, choices.begun())  # until then an error still has a status of its own
        except BaseException:
            choices.cancel()
            raise
        return StreamingResponse(
            _events(shape, choices),
            media_type="text/event-stream",
            headers={"x-kvrelay-path": choices.path or "", "cache-control": "no-cache"},
        )


async def _events(shape: Shape, choices: Choices) -> AsyncIterator[str]:
    """The server-sent events of a stream; leaving it ends the generation."""
    try:
        ends = []
        async with aclosing(choices.responses()) as responses:
            async for index, response, logprobs in responses:
                chunk = shape.chunk(index, response, logprobs)
                if response.finish_reason is not None:
                    ends.append((index, response))
                    if len(ends) == len(choices) and not shape.completion.include_usage:
                        chunk["kvrelay"] = account([one for _, one in sorted(ends, key=lambda end: end[0])])
                yield _event(chunk)
        if shape.completion.include_usage:
            answers = [one for _, one in sorted(ends, key=lambda end: end[0])]
            chunk = shape.usage_chunk([one.usage for one in answers if one.usage is not None])
            yield _event(chunk | {"kvrelay": account(answers)})
    except KvRelayError as error:
        yield _event(error_body(error))
    finally:
        choices.cancel()
    yield "data: [DONE]\n\n"


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _read(request: Request) -> Json:
    """The body as a JSON object. Raises HTTPException for one that is too large, InvalidArgument."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("compressed bodies are not accepted; send it as it is", field="content-encoding")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is over {MAX_BODY_BYTES} bytes")
    return load_json(bytes(body))


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises Cancelled then."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return await task
    finally:
        for one in (task, watch):
            one.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _typed(handler: Handler) -> Handler:
    """Answers a typed error in OpenAI's shape."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=Code.CANCELLED.http_status)
        except KvRelayError as error:
            headers = {}
            if error.retry_after_s is not None:
                headers["retry-after"] = str(math.ceil(error.retry_after_s))
            return JSONResponse(error_body(error), status_code=error.code.http_status, headers=headers)

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods, bodies that are too large."""
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)
