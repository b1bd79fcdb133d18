"""The HTTP door, in OpenAI's words."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvrelay
from kvrelay.clock import Clock
from kvrelay.errors import Cancelled, Code, Internal, InvalidArgument, KvRelayError
from kvrelay.telemetry import get_logger
from kvrelay.wire.inference import GenerateResponse
from router.choices import Choices
from router.driver import Driver
from router.intake import Intake
from router.metrics import Metrics
from router.openai_request import (
    Completion,
    Json,
    load_json,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from router.openai_response import DONE, Head, Shape, error_body, event, to_json
from router.openapi import describe
from router.page import StatusPage
from router.validation import check_messages, check_model, check_request_id, check_text, check_token_ids

MAX_BODY_BYTES = 4 * 2**20
Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter is nginx's

log = get_logger("router.openai")


def build_app(intake: Intake, driver: Driver, metrics: Metrics, clock: Clock, page: StatusPage) -> Starlette:
    door = OpenAiDoor(intake, driver, metrics, clock)
    routes = [
        Route("/v1/models", _typed(door.models), methods=["GET"]),
        Route("/v1/models/{id:path}", _typed(door.model), methods=["GET"]),
        Route("/v1/completions", _typed(door.completions), methods=["POST"]),
        Route("/v1/chat/completions", _typed(door.chat), methods=["POST"]),
        Route("/tokenize", _typed(door.tokenize), methods=["POST"]),
        Route("/detokenize", _typed(door.detokenize), methods=["POST"]),
        Route("/health", _typed(door.health), methods=["GET"]),
        Route("/metrics", _typed(door.metrics), methods=["GET"]),
        Route("/version", _typed(door.version), methods=["GET"]),
        Route("/openapi.json", _typed(door.openapi), methods=["GET"]),
        Route("/status.json", _typed(page.status), methods=["GET"]),
        *page.files(),
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
        completion = parse_completion(await _read(request), request.state.request_id)
        return await self._generate(request, completion, arrival)

    async def chat(self, request: Request) -> Response:
        arrival = self._clock.now()
        completion = parse_chat(await _read(request), request.state.request_id)
        return await self._generate(request, completion, arrival)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["id"], self._intake.card)
        return JSONResponse(self._model())

    def _model(self) -> Json:
        return {
            "id": self._intake.card.info.id,
            "object": "model",
            "created": self._started,
            "owned_by": "kvrelay",
            "max_model_len": self._intake.max_model_len,
            "vocab_size": self._intake.card.vocab_size,
        }

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": kvrelay.__version__})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe(kvrelay.__version__))

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await _read(request))
        check_model(asked.model, self._intake.card)
        text = self._intake.text
        if asked.prompt is None:
            check_messages(asked.messages)
            tokens = await text.encode_chat(asked.messages)
        else:
            check_text("prompt", asked.prompt)
            tokens = await text.encode(asked.prompt, asked.add_special_tokens)
        found: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": self._intake.max_model_len,
            "tokens": tokens,
        }
        if asked.return_token_strs:
            found["token_strs"] = text.spell(tokens)
        return JSONResponse(found)

    async def detokenize(self, request: Request) -> Response:
        model, tokens = parse_detokenize(await _read(request))
        check_model(model, self._intake.card)
        check_token_ids("tokens", tokens, self._intake.card)
        return JSONResponse({"prompt": await self._intake.text.decode(tokens)})

    async def health(self, request: Request) -> Response:
        state = self._driver.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _generate(self, request: Request, completion: Completion, arrival: float) -> Response:
        traceparent = request.headers.get("traceparent", "")
        choices = await Choices.open(self._intake, completion, arrival, traceparent)
        request.state.request_id = completion.request_id  # which has been checked
        try:
            head = Head(
                id=("chatcmpl-" if completion.chat else "cmpl-") + request.state.request_id,
                created=int(time.time()),
                model=self._intake.card.info.id,
            )
            shape = Shape(completion, head, await choices.echoes() if completion.echo else ())
            if not completion.stream:
                answers, logprobs = await _unless_gone(request, choices.whole())
                return JSONResponse(shape.whole(answers, logprobs), headers={"x-kvrelay-path": answers[0].path or ""})
            await _unless_gone(request, choices.begun())  # until then an error still has a status of its own
        except BaseException:
            choices.cancel()
            raise
        return _EventStream(choices, _events(completion, shape, choices, request.state.request_id))


class _EventStream(StreamingResponse):
    """Ends the generation also when its events are never asked for, since the connection was lost before."""

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        headers = _STREAM_HEADERS | {"x-kvrelay-path": choices.path or ""}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.cancel()


async def _events(completion: Completion, shape: Shape, choices: Choices, request_id: str) -> AsyncIterator[str]:
    """The server-sent events of a stream; leaving it ends the generation."""
    try:
        ends: dict[int, GenerateResponse] = {}
        async with aclosing(choices.responses()) as responses:
            async for index, response, logprobs in responses:
                last = ""
                if response.finish_reason is not None:
                    ends[index] = response
                    if len(ends) == len(choices) and not completion.include_usage:
                        last = shape.last_members([ends[one] for one in sorted(ends)])
                usage = choices.usage(index, response) if completion.continuous_usage else None
                yield shape.chunk(index, response, logprobs, usage, last)
        if completion.include_usage:
            yield shape.usage_chunk([ends[one] for one in sorted(ends)])
    except KvRelayError as error:
        yield event(error_body(error))
    except Exception:
        log.exception("unexpected error", request=request_id)
        yield event(error_body(_unexpected(request_id)))
    finally:
        choices.cancel()
    yield DONE


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
    """Gives the request its id, and answers an error in OpenAI's shape."""

    async def handle(request: Request) -> Response:
        given = request.headers.get("x-request-id", "")
        request_id = request.state.request_id = given or uuid.uuid4().hex
        try:
            check_request_id(given)
            response = await handler(request)
            request_id = request.state.request_id  # the body may have named another
        except ClientDisconnect:
            return Response(status_code=Code.CANCELLED.http_status)
        except HTTPException as error:
            response = await _http_error(request, error)
        except KvRelayError as error:
            if error.field == "request_id":
                request_id = uuid.uuid4().hex  # the given one may not be fit for a header
            response = _error_response(error)
        except Exception:
            log.exception("unexpected error", request=request_id)
            response = _error_response(_unexpected(request_id))
        response.headers["x-request-id"] = request_id
        return response

    return handle


def _error_response(error: KvRelayError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.code is Code.UNIMPLEMENTED:
        headers["x-should-retry"] = "false"  # OpenAI's clients would, as after any 5xx
    return _error_json(error_body(error), error.code.http_status, headers)


def _error_json(body: Json, status: int, headers: Mapping[str, str] | None) -> Response:
    """In ASCII: what a client sent, and an error repeats, need not be text that UTF-8 can hold."""
    return Response(to_json(body), status, headers, media_type="application/json")


def _unexpected(request_id: str) -> KvRelayError:
    """All that a client learns; the log has the trace."""
    return Internal(f"an unexpected error in the router; its log has the reason under request {request_id}")


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods, bodies that are too large."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
    body = {"message": error.detail, "type": kind, "param": None, "code": error.status_code}
    return _error_json({"error": body}, error.status_code, error.headers)
