"""Handlers of the HTTP routes. Every dialect of the routes that generate text is served alike."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import kvrelay
from kvrelay.errors import InvalidArgument
from router.api.http.body import Bodies
from router.api.http.chat.answer_format import AnswerFormat
from router.api.http.choices import Choices
from router.api.http.connections.sending import EventStream, JsonParts, events, unless_gone
from router.api.http.dialects.anthropic.requests import parse_count_tokens
from router.api.http.dialects.anthropic.response_models import CountedTokens
from router.api.http.dialects.dialect import Dialect, Head, Opened
from router.api.http.dialects.openai.requests import (
    chat_messages,
    parse_detokenize,
    parse_tokenize,
)
from router.api.http.dialects.openai.response_models import Model, Models, Text, Version
from router.api.http.error_responses import Handler
from router.api.http.openapi import document
from router.api.http.tokenized import tokenized_steps
from router.catalogue import Catalogue
from router.frontend.frontend import Frontend
from router.frontend.tokenization import TokenBound
from router.frontend.validation import check_messages, check_model, check_text, check_token_ids
from router.observability.exposition import Exposition
from router.served_model import RouterContext

# Limit on the tokens of one request to /tokenize or /detokenize. A longer context raises it.
MAX_CONVERTED = 2**17


class HttpEndpoint:
    """Handlers of the HTTP routes. They raise KvRelayErrors, which `typed` answers."""

    def __init__(self, catalogue: Catalogue, context: RouterContext) -> None:
        self._catalogue = catalogue
        self._limits = context.limits
        self._exposition = Exposition(
            [one.metrics.registry for one in catalogue],
            [one.metrics.cluster for one in catalogue],
            [one.tenant_metrics for one in catalogue],
            context.clock,
            context.siblings,
        )
        self._clock = context.clock
        self._slices = context.slices
        self._bodies = Bodies(context.slices)
        self._started = int(time.time())
        self._openapi = document(kvrelay.__version__)

    def generating(self, dialect: Dialect) -> Handler:
        """Returns the handler of a route that generates text."""

        async def handle(request: Request) -> Response:
            return await self._generate(request, dialect)

        return handle

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the list of the served models and their adapters."""
        names = [
            (one, name)
            for one in self._catalogue
            for name in ("", *(adapter.name for adapter in one.card.adapters))
        ]
        return JSONResponse(
            Models(data=[self._model(one.frontend, name) for one, name in names]).model_dump()
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/ID. Raises NotFound for another model."""
        name = request.path_params["id"]
        frontend = self._catalogue.find(name).frontend
        check_model(name, frontend.card)
        return JSONResponse(self._model(frontend, name).model_dump())

    def _model(self, frontend: Frontend, name: str) -> Model:
        base, adapter = frontend.card.info.id, frontend.card.adapters.get(name)
        return Model(
            id=base if adapter is None else adapter.name,
            root=base if adapter is None else adapter.root,
            parent=None if adapter is None else base,
            created=self._started,
            max_model_len=frontend.max_model_len,
            vocab_size=frontend.card.vocab_size,
        )

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse(Version(version=kvrelay.__version__).model_dump())

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: the OpenAPI description."""
        return Response(self._openapi, media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize. Counts as a request in the tenant's rate limit."""
        tenant = request.state.tenant
        self._limits.check_request(tenant, self._clock.now())
        async with self._bodies.parsed(request, lambda body, _: parse_tokenize(body)) as asked:
            frontend = self._catalogue.find(asked.model or "").frontend
            check_model(asked.model or "", frontend.card)
            self._limits.take_request(tenant, self._clock.now())
            text, most = frontend.text, _most_converted(frontend)
            bound = TokenBound(most, f"{most} are tokenized in one request")
            if asked.prompt is None:
                messages = chat_messages(asked.messages or [])
                check_messages(messages)
                tokens = await text.encode_chat(messages, tenant, bound)
            else:
                check_text("prompt", asked.prompt, nul=True)
                special = asked.add_special_tokens is not False
                tokens = await text.encode(asked.prompt, special, tenant, bound)
        spell = text.spell if asked.return_token_strs else None
        steps = tokenized_steps(tokens, frontend.max_model_len, spell)
        return Response(await self._slices.run(tenant, steps), media_type="application/json")

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens. Counts as a request in the tenant's rate limit."""
        tenant = request.state.tenant
        self._limits.check_request(tenant, self._clock.now())
        async with self._bodies.parsed(request, parse_count_tokens) as counted:
            (asked,) = counted.requests
            frontend = self._catalogue.find(asked.model).frontend
            check_model(asked.model, frontend.card)
            check_messages(asked.messages)
            text, most = frontend.text, _most_converted(frontend)
            bound = TokenBound(most, f"{most} are counted in one request")
            form = AnswerFormat(counted, text, frontend.guidance)
            options = (await form.applied(counted, tenant)).chat_options
            self._limits.take_request(tenant, self._clock.now())
            tokens = await text.encode_chat(asked.messages, tenant, bound, options)
        return JSONResponse(CountedTokens(input_tokens=len(tokens)).model_dump())

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. Counts as a request in the tenant's rate limit."""
        tenant = request.state.tenant
        self._limits.check_request(tenant, self._clock.now())
        async with self._bodies.parsed(request, lambda body, _: parse_detokenize(body)) as (
            model,
            tokens,
        ):
            frontend = self._catalogue.find(model).frontend
            check_model(model, frontend.card)
        if len(tokens) > (most := _most_converted(frontend)):
            raise InvalidArgument(
                f"tokens has {len(tokens)} entries; at most {most} are allowed in one request",
                field="tokens",
            )
        check_token_ids("tokens", tokens, frontend.card)
        self._limits.take_request(tenant, self._clock.now())
        prompt = await frontend.text.decode(tokens, tenant)
        return JSONResponse(Text(prompt=prompt).model_dump())

    async def health(self, request: Request) -> Response:
        """GET /health: the router's state, with status 200 if ready and 503 otherwise."""
        state = self._catalogue.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    async def status(self, request: Request) -> Response:
        """GET /status.json: the status page's snapshot of the model in the query parameter `model`,
        by default of the first. Raises NotFound for another model.
        """
        name = request.query_params.get("model", "")
        shown = self._catalogue.find(name) if name else next(iter(self._catalogue))
        check_model(name, shown.card)
        return await shown.page.status(request)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the metrics that the caller's tenant may see, in Prometheus text format."""
        text = await self._exposition.text(request.state.tenant)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _generate(self, request: Request, dialect: Dialect) -> Response:
        arrival = self._clock.now()
        tenant, traceparent = request.state.tenant, request.headers.get("traceparent", "")
        self._catalogue.check_caller(tenant)
        async with self._bodies.parsed(request, dialect.parse) as completion:
            request.state.choices = len(completion.requests)
            frontend = self._catalogue.find(completion.requests[0].model).frontend
            form = AnswerFormat(completion, frontend.text, frontend.guidance)
            completion = await form.applied(completion, tenant)
            choices = await Choices.open(frontend, completion, tenant, arrival, traceparent)
        completion = choices.completion
        # The id has been checked.
        request.state.request_id = completion.request_id
        try:
            head = Head(
                id=dialect.id_prefix + request.state.request_id,
                created=int(time.time()),
                model=completion.requests[0].model or frontend.card.info.id,
            )
            echoes = await choices.echoes() if completion.echo else ()
            answers = form.answers(head.id, choices.streams)
            shape = dialect.shape(Opened(choices, head, echoes, answers))
            if not completion.stream:
                ends, logprobs = await unless_gone(request, choices.whole(shape.hear))
                parts = await self._slices.run(tenant, shape.whole(ends, logprobs))
                return JsonParts(parts, {"x-kvrelay-path": ends[0].path or ""})
            # Before the first event, an error can still set the HTTP status.
            await unless_gone(request, choices.begun())
        except BaseException:
            choices.cancel()
            raise
        return EventStream(choices, events(choices, shape, request.state.request_id))


def _most_converted(frontend: Frontend) -> int:
    """Limit on the tokens that one request may encode or decode."""
    return max(frontend.max_model_len, MAX_CONVERTED)
