"""The HTTP endpoint, compatible with OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvrelay
from kvrelay.clock import Clock
from kvrelay.errors import Cancelled, InvalidArgument, KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.tenants import ANY_ROLE
from kvrelay.wire.inference import GenerateResponse
from router.api.http.auth import HttpAccess
from router.api.http.body import Bodies
from router.api.http.chat.answer_format import AnswerFormat
from router.api.http.choices import Choices
from router.api.http.errors import http_error, typed, unexpected
from router.api.http.openapi import describe
from router.api.http.pacing import HttpPace
from router.api.http.requests import (
    Completion,
    Json,
    chat_messages,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from router.api.http.response_models import Model, Models, Text, Version
from router.api.http.responses import DONE, Head, Shape, error_body, event, tokenized_steps
from router.frontend.access import Access
from router.frontend.frontend import Frontend
from router.frontend.tokenization import TokenBound
from router.frontend.validation import check_messages, check_model, check_text, check_token_ids
from router.frontend.waiting_room import WaitingRoom
from router.observability.dashboard import StatusPage
from router.observability.exposition import Exposition
from router.observability.metrics import Metrics
from router.observability.tenant_metrics import TenantMetrics
from router.runtime.driver import Driver
from router.runtime.loop_slices import LoopSlices

# Size up to which a body is written at once.
_ONE_PART_BYTES = 2**16
T = TypeVar("T")
# Limit on the tokens of one request to /tokenize or /detokenize. A longer context raises it.
MAX_CONVERTED = 2**17
# nginx reads the second header.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = get_logger("router.openai")


def build_app(
    frontend: Frontend,
    driver: Driver,
    metrics: Metrics,
    tenant_metrics: TenantMetrics,
    clock: Clock,
    page: StatusPage,
    access: Access,
    waiting_room: WaitingRoom,
    address: str,
    slices: LoopSlices,
) -> Starlette:
    """Builds the ASGI application. `address` is the listener's HOST:PORT."""
    endpoint = OpenAiEndpoint(frontend, driver, metrics, tenant_metrics, clock, slices)
    # Probes and browsers' address bars send no token. These routes reveal nothing about requests or
    # tenants.
    in_the_open = [Route("/health", typed(endpoint.health), methods=["GET"]), *page.files()]
    routes = [
        *in_the_open,
        Route("/v1/models", typed(endpoint.models), methods=["GET"]),
        Route("/v1/models/{id:path}", typed(endpoint.model), methods=["GET"]),
        Route("/v1/completions", typed(endpoint.completions), methods=["POST"]),
        Route("/v1/chat/completions", typed(endpoint.chat), methods=["POST"]),
        Route("/tokenize", typed(endpoint.tokenize), methods=["POST"]),
        Route("/detokenize", typed(endpoint.detokenize), methods=["POST"]),
        Route("/metrics", typed(endpoint.metrics, ANY_ROLE), methods=["GET"]),
        Route("/version", typed(endpoint.version, ANY_ROLE), methods=["GET"]),
        Route("/openapi.json", typed(endpoint.openapi, ANY_ROLE), methods=["GET"]),
        Route("/status.json", typed(page.status, ANY_ROLE), methods=["GET"]),
    ]
    open_paths = [one.path for one in in_the_open]
    guards = [
        Middleware(
            HttpAccess,
            access=access,
            open_paths=open_paths,
            address=address,
            waiting_room=waiting_room,
        ),
        Middleware(HttpPace, waiting_room=waiting_room),
    ]
    app = Starlette(
        routes=routes, middleware=guards, exception_handlers={HTTPException: http_error}
    )
    # A redirect would use the client's Host header.
    app.router.redirect_slashes = False
    return app


class OpenAiEndpoint:
    """Handlers of the HTTP routes. They raise KvRelayErrors, which `typed` answers."""

    def __init__(
        self,
        frontend: Frontend,
        driver: Driver,
        metrics: Metrics,
        tenant_metrics: TenantMetrics,
        clock: Clock,
        slices: LoopSlices,
    ) -> None:
        self._frontend = frontend
        self._driver = driver
        self._exposition = Exposition(metrics.registry, tenant_metrics, clock)
        self._clock = clock
        self._slices = slices
        self._bodies = Bodies(slices)
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, parse_completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, parse_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the list of the served model."""
        return JSONResponse(Models(data=[self._model()]).model_dump())

    async def model(self, request: Request) -> Response:
        """GET /v1/models/ID. Raises NotFound for another model."""
        check_model(request.path_params["id"], self._frontend.card)
        return JSONResponse(self._model().model_dump())

    def _model(self) -> Model:
        return Model(
            id=self._frontend.card.info.id,
            root=self._frontend.card.info.id,
            created=self._started,
            max_model_len=self._frontend.max_model_len,
            vocab_size=self._frontend.card.vocab_size,
        )

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse(Version(version=kvrelay.__version__).model_dump())

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: the OpenAPI description."""
        return JSONResponse(describe(kvrelay.__version__))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize. Counts as a request in the tenant's rate limit."""
        tenant = request.state.tenant
        self._frontend.limits.check_request(tenant, self._clock.now())
        text = self._frontend.text
        most = self._most_converted
        bound = TokenBound(most, f"{most} are tokenized in one request")
        async with self._bodies.parsed(request, lambda body, _: parse_tokenize(body)) as asked:
            check_model(asked.model or "", self._frontend.card)
            self._frontend.limits.take_request(tenant, self._clock.now())
            if asked.prompt is None:
                messages = chat_messages(asked.messages or [])
                check_messages(messages)
                tokens = await text.encode_chat(messages, tenant, bound)
            else:
                check_text("prompt", asked.prompt)
                special = asked.add_special_tokens is not False
                tokens = await text.encode(asked.prompt, special, tenant, bound)
        spell = text.spell if asked.return_token_strs else None
        steps = tokenized_steps(tokens, self._frontend.max_model_len, spell)
        return Response(await self._slices.run(tenant, steps), media_type="application/json")

    @property
    def _most_converted(self) -> int:
        """Limit on the tokens that one request may encode or decode."""
        return max(self._frontend.max_model_len, MAX_CONVERTED)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. Counts as a request in the tenant's rate limit."""
        tenant = request.state.tenant
        self._frontend.limits.check_request(tenant, self._clock.now())
        async with self._bodies.parsed(request, lambda body, _: parse_detokenize(body)) as (
            model,
            tokens,
        ):
            check_model(model, self._frontend.card)
        if len(tokens) > self._most_converted:
            raise InvalidArgument(
                f"tokens has {len(tokens)} entries; at most {self._most_converted} are allowed "
                "in one request",
                field="tokens",
            )
        check_token_ids("tokens", tokens, self._frontend.card)
        self._frontend.limits.take_request(tenant, self._clock.now())
        prompt = await self._frontend.text.decode(tokens, tenant)
        return JSONResponse(Text(prompt=prompt).model_dump())

    async def health(self, request: Request) -> Response:
        """GET /health: the router's state, with status 200 if ready and 503 otherwise."""
        state = self._driver.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the metrics that the caller's tenant may see, in Prometheus text format."""
        return Response(self._exposition.text(request.state.tenant), media_type=CONTENT_TYPE_LATEST)

    async def _generate(
        self, request: Request, parse: Callable[[Json, str], Completion]
    ) -> Response:
        arrival = self._clock.now()
        tenant, traceparent = request.state.tenant, request.headers.get("traceparent", "")
        self._frontend.check_caller(tenant)
        async with self._bodies.parsed(request, parse) as completion:
            form = AnswerFormat(completion, self._frontend.text)
            choices = await Choices.open(
                self._frontend, form.applied(completion), tenant, arrival, traceparent
            )
        completion = choices.completion
        # The id has been checked.
        request.state.request_id = completion.request_id
        try:
            head = Head(
                id=("chatcmpl-" if completion.chat else "cmpl-") + request.state.request_id,
                created=int(time.time()),
                model=self._frontend.card.info.id,
            )
            echoes = await choices.echoes() if completion.echo else ()
            shape = Shape(completion, head, echoes, form.answers(head.id, choices.streams))
            if not completion.stream:
                answers, logprobs = await _unless_gone(request, choices.whole())
                parts = await self._slices.run(tenant, shape.whole(answers, logprobs))
                return _JsonParts(parts, {"x-kvrelay-path": answers[0].path or ""})
            # Before the first event, an error can still set the HTTP status.
            await _unless_gone(request, choices.begun())
        except BaseException:
            choices.cancel()
            raise
        return _EventStream(choices, _events(completion, shape, choices, request.state.request_id))


class _JsonParts(Response):
    """A JSON body that is written part by part: an answer with logprobs may have many megabytes."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: dict[str, str]) -> None:
        length = sum(map(len, parts))
        super().__init__(headers=headers | {"content-length": str(length)})
        self._parts = parts if length > _ONE_PART_BYTES else [b"".join(parts)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        *parts, last = self._parts
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": last})


class _EventStream(Response):
    """An event stream. It cancels its choices if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        super().__init__(headers=_STREAM_HEADERS | {"x-kvrelay-path": choices.path or ""})
        del self.headers["content-length"]
        self._choices = choices
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for text in self._events:
                body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                await send(body)
            await send({"type": "http.response.body", "body": b""})
        finally:
            watch.cancel()
            self._choices.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        await _gone(receive)
        self._choices.cancel()


async def _events(
    completion: Completion, shape: Shape, choices: Choices, request_id: str
) -> AsyncIterator[str]:
    """Yields the server-sent events of a stream. Closing the generator cancels the choices."""
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
        log.exception("unexpected_error", request=request_id)
        yield event(error_body(unexpected(request_id)))
    finally:
        choices.cancel()
    yield DONE


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects, cancels `work` and raises
    Cancelled.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return await task
    finally:
        for one in (task, watch):
            one.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
