"""The OpenAPI 3.1 description of the HTTP endpoint, built from the fields that the parser reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.errors import Code
from router.api.http.schemas import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Schema

_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer"}}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_HTTP_ERRORS = {
    404: "no such path",
    405: "no such method",
    408: "the request came too slowly",
    413: "the body is too large",
    415: "the body is compressed",
    431: "headers too large",
}


def describe(version: str) -> dict[str, Any]:
    """Returns the OpenAPI document for this version of kvrelay."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version},
        "paths": {
            "/v1/models": {"get": _get("models", "The model that is served", _ref("Models"))},
            "/v1/models/{id}": {"get": _get("model", "One model", _ref("Model"), "id")},
            "/v1/completions": {
                "post": _post(
                    "completions", "Go on from prompts", "CompletionRequest", "Completion"
                )
            },
            "/v1/chat/completions": {
                "post": _post("chat", "Answer messages", "ChatRequest", "Chat")
            },
            "/tokenize": {
                "post": _post(
                    "tokenize", "Text or messages to token ids", "TokenizeRequest", "Tokens"
                )
            },
            "/detokenize": {
                "post": _post("detokenize", "Token ids to text", "DetokenizeRequest", "Text")
            },
            "/version": {
                "get": _get("version", "Of kvrelay", _object({"version": {"type": "string"}}))
            },
            "/health": {"get": _health()},
            "/metrics": {
                "get": _get("metrics", "For Prometheus", {"type": "string"}, media="text/plain")
            },
        },
        # A cluster without a tokens file needs no authentication.
        "security": [{}, {"bearer": []}],
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Returns the schema of an object that requires all properties except the optional ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": [one for one in properties if one not in optional],
    }


def _request(fields: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required)}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, said: Mapping[str, Schema]) -> Schema:
    choice = {
        "index": _COUNT,
        **said,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length"]},
        "token_ids": _TOKEN_IDS,
    }
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": _COUNT,
            "model": {"type": "string"},
            "choices": _list(_object(choice, "token_ids")),
            "usage": _ref("Usage"),
            "kvrelay": {
                "type": ["object", "array"],
                "description": "Path, reason and ledger, of each choice.",
            },
        }
    )


def _get(
    name: str, says: str, schema: Schema, parameter: str = "", media: str = "application/json"
) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": name, "summary": says}
    if parameter:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation | {"responses": {"200": _content("It is well.", schema, media), **_errors()}}


def _post(name: str, says: str, request: str, answer: str) -> dict[str, Any]:
    good = _content("The answer.", _ref(answer))
    if answer in ("Completion", "Chat"):
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        good["headers"] = {"x-kvrelay-path": {"schema": {"enum": ["disaggregated", "local"]}}}
    return {
        "operationId": name,
        "summary": says,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {"200": good, **_errors()},
    }


def _health() -> dict[str, Any]:
    schema = _object({"status": {"enum": ["starting", "ready", "draining"]}})
    return {
        "operationId": "health",
        "security": [],
        "summary": "Whether requests can be served",
        "responses": {
            "200": _content("They can.", schema),
            "503": _content("They cannot.", schema),
        },
    }


def _content(says: str, schema: Schema, media: str = "application/json") -> dict[str, Any]:
    return {"description": says, "content": {media: {"schema": schema}}}


def _errors() -> dict[str, Any]:
    """Returns a response for each HTTP status that an error can have."""
    says = dict(_HTTP_ERRORS)
    for code in Code:
        says.setdefault(code.http_status, code.openai_type)
    return {str(status): _content(text, _ref("Error")) for status, text in sorted(says.items())}


_SCHEMAS: dict[str, Schema] = {
    "CompletionRequest": _request(COMPLETION, "prompt"),
    "ChatRequest": _request(CHAT, "messages"),
    "TokenizeRequest": _request(TOKENIZE)
    | {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    "DetokenizeRequest": _request(DETOKENIZE, "tokens"),
    "Completion": _answer("text_completion", {"text": {"type": "string"}}),
    "Chat": _answer(
        "chat.completion",
        {"message": _object({"role": {"const": "assistant"}, "content": {"type": "string"}})},
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        }
    ),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _TOKEN_IDS,
            "token_strs": _list({"type": "string"}),
        },
        "token_strs",
    ),
    "Text": _object({"prompt": {"type": "string"}}),
    "Model": _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": {"type": "string"},
            "max_model_len": _COUNT,
            "vocab_size": _COUNT,
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _nullable({"type": "string"}),
                    "code": {"type": "integer"},
                }
            )
        }
    ),
}
