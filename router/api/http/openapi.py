"""The OpenAPI 3.1 description of the HTTP endpoint, assembled from the pydantic models."""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from kvrelay.errors import Code
from router.api.http.common_fields import Generation
from router.api.http.dialects.anthropic.errors import status_of
from router.api.http.dialects.anthropic.request_models import CountTokensRequest, MessagesRequest
from router.api.http.dialects.anthropic.response_models import (
    AnthropicError,
    AnthropicMessage,
    CountedTokens,
)
from router.api.http.dialects.openai import response_models as responses
from router.api.http.dialects.openai.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.http.dialects.responses.request_models import ResponsesRequest
from router.api.http.dialects.responses.response_models import ModelResponse
from router.api.http.error_responses import is_anthropic

_REF = "#/components/schemas/{model}"
_HTTP_ERRORS = {
    404: "no such path",
    405: "no such method",
    408: "the request came too slowly",
    413: "the body is too large",
    415: "the body is compressed",
    431: "headers too large",
    505: "not HTTP/1",
}
Body = type[BaseModel] | None
# Route: operation id, summary, model of the body, model of the answer.
_ROUTES: dict[str, tuple[str, str, Body, Body]] = {
    "/v1/models": ("models", "List the served model", None, responses.Models),
    "/v1/models/{id}": ("model", "Describe a model", None, responses.Model),
    "/v1/completions": ("completions", "Complete prompts", CompletionRequest, responses.Completion),
    "/v1/chat/completions": ("chat", "Answer a conversation", ChatRequest, responses.Chat),
    "/v1/responses": (
        "responses",
        "Answer input items, in the dialect of OpenAI's Responses API",
        ResponsesRequest,
        ModelResponse,
    ),
    "/v1/messages": (
        "messages",
        "Answer a conversation, in Anthropic's dialect",
        MessagesRequest,
        AnthropicMessage,
    ),
    "/v1/messages/count_tokens": (
        "countTokens",
        "Count the tokens of a conversation",
        CountTokensRequest,
        CountedTokens,
    ),
    "/tokenize": ("tokenize", "Encode text or messages", TokenizeRequest, responses.Tokens),
    "/detokenize": ("detokenize", "Decode token ids", DetokenizeRequest, responses.Text),
    "/version": ("version", "Return the release of kvrelay", None, responses.Version),
    "/health": ("health", "Return whether the cluster serves", None, responses.Health),
    "/metrics": ("metrics", "Return Prometheus metrics", None, None),
}


@functools.cache
def document(version: str) -> bytes:
    """Returns the OpenAPI document as JSON. It is made once, since that takes about 0.1 s."""
    return json.dumps(describe(version)).encode()


def describe(version: str) -> dict[str, Any]:
    """Returns the OpenAPI document for this version of kvrelay."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (responses.Error, "serialization"),
        (AnthropicError, "serialization"),
    ]
    for _, _, body, answer in _ROUTES.values():
        models += [(body, "validation")] if body else []
        models += [(answer, "serialization")] if answer else []
    _, schemas = models_json_schema(models, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version},
        "paths": {
            path: {"get" if route[2] is None else "post": _operation(path, *route)}
            for path, route in _ROUTES.items()
        },
        # A cluster without a tokens file needs no authentication.
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, name: str, summary: str, body: Body, answer: Body) -> dict[str, Any]:
    good = _content("Success", answer)
    operation: dict[str, Any] = {"operationId": name, "summary": summary}
    operation["responses"] = {"200": good, **_errors(path)}
    if "{id}" in path:
        schema = {"type": "string"}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if answer is responses.Health:
        operation["security"] = []
        operation["responses"] = {"200": good, "503": _content("Not ready", answer)}
    if body is not None:
        content = _content("", body)["content"]
        operation["requestBody"] = {"required": True, "content": content}
    if body is not None and issubclass(body, Generation):
        # OpenAPI 3.1 has no place for the schema of an event, and tools take that of the whole
        # stream for it.
        good["content"]["text/event-stream"] = {}
        good["headers"] = {"x-kvrelay-path": {"schema": {"enum": ["disaggregated", "local"]}}}
    return operation


def _content(description: str, model: Body) -> dict[str, Any]:
    """Returns a content of JSON, or of plain text without a model."""
    schema = {"$ref": _REF.format(model=model.__name__)} if model else {"type": "string"}
    media = "application/json" if model else "text/plain"
    return {"description": description, "content": {media: {"schema": schema}}}


def _errors(path: str) -> dict[str, Any]:
    """Returns a response for each HTTP status that an error of the route can have."""
    texts = dict(_HTTP_ERRORS)
    anthropic = is_anthropic(path)
    for code in Code:
        status = status_of(code) if anthropic else code.http_status
        texts.setdefault(status, code.openai_type)
    model = AnthropicError if anthropic else responses.Error
    return {str(status): _content(text, model) for status, text in sorted(texts.items())}
