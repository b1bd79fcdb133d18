"""Anthropic's error bodies. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from kvrelay.errors import Code, KvRelayError

Json = dict[str, Any]

_OVERLOADED = 529
# A status that Anthropic's clients do not know becomes one that they do.
_STATUSES = {
    # A feature that is not there. Clients retry after a 5xx.
    Code.UNIMPLEMENTED: HTTPStatus.BAD_REQUEST,
    Code.UNAVAILABLE: _OVERLOADED,
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# Clients that keep a conversation on the server send all of it after this error.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def status_of(code: Code) -> int:
    """Returns the HTTP status of errors with this code."""
    return int(_STATUSES.get(code, code.http_status))


def error_body(error: KvRelayError, request_id: str) -> Json:
    """Returns the error's body."""
    body = _body(error.message, status_of(error.code), request_id)
    if error.field == "thread":
        body["error"]["details"] = _NO_THREADS
    return body


def http_error_body(error: HTTPException, request_id: str) -> Json:
    """Returns the body of an error that the HTTP layer found."""
    return _body(error.detail, error.status_code, request_id)


def _body(message: str, status: int, request_id: str) -> Json:
    default = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = _TYPES.get(status, default)
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
