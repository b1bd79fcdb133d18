"""OpenAI's error bodies. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from kvrelay.errors import KvRelayError

Json = dict[str, Any]


def error_body(error: KvRelayError) -> Json:
    """Returns the error's body."""
    return _body(error.message, error.code.openai_type, error.field, error.code.http_status)


def http_error_body(error: HTTPException) -> Json:
    """Returns the body of an error that the HTTP layer found."""
    kind = (
        "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
    )
    return _body(error.detail, kind, None, error.status_code)


def _body(message: str, kind: str, field: str | None, status: int) -> Json:
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}
