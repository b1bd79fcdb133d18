"""HTTP errors in OpenAI's shape."""

from __future__ import annotations

import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvrelay.errors import Code, Internal, KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.tenants import CLIENT, Role
from router.api.http.responses import error_body, to_json
from router.frontend.access import check_role
from router.frontend.validation import check_request_id

Handler = Callable[[Request], Awaitable[Response]]

log = get_logger("router.http")


def typed(handler: Handler, roles: frozenset[Role] = CLIENT) -> Handler:
    """Wraps a handler for callers with one of the roles. Sets the request's id and answers errors
    in OpenAI's shape.
    """

    async def handle(request: Request) -> Response:
        given = request.headers.get("x-request-id", "")
        request_id = request.state.request_id = given or uuid.uuid4().hex
        try:
            check_request_id(given)
            check_role(request.state.tenant, roles)
            response = await handler(request)
            # The body may have set another id.
            request_id = request.state.request_id
        except ClientDisconnect:
            return Response(status_code=Code.CANCELLED.http_status)
        except HTTPException as error:
            response = await http_error(request, error)
        except KvRelayError as error:
            if error.field == "request_id":
                # The given id may be invalid as a header value.
                request_id = uuid.uuid4().hex
            response = error_response(error)
        except Exception:
            log.exception("unexpected_error", request=request_id)
            response = error_response(unexpected(request_id))
        response.headers["x-request-id"] = request_id
        return response

    return handle


def error_response(error: KvRelayError) -> Response:
    """Returns the HTTP response for the error, with its status and headers."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.code is Code.UNIMPLEMENTED:
        # OpenAI's clients retry after other 5xx statuses.
        headers["x-should-retry"] = "false"
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return _json(error_body(error), error.code.http_status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    """Returns the response to an HTTPException: unknown path, wrong method, or a body that is too
    large or too slow.
    """
    assert isinstance(error, HTTPException)
    kind = (
        "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
    )
    body = {"message": error.detail, "type": kind, "param": None, "code": error.status_code}
    return _json({"error": body}, error.status_code, error.headers)


def unexpected(request_id: str) -> KvRelayError:
    """Returns an error without details for the client. The log has the traceback under the request
    id.
    """
    return Internal(
        f"unexpected error in the router; its log has the cause under request {request_id}"
    )


def _json(body: dict[str, Any], status: int, headers: Mapping[str, str] | None) -> Response:
    """Encodes the body in ASCII. An error may repeat a client's text, which UTF-8 cannot always
    encode.
    """
    return Response(to_json(body), status, headers, media_type="application/json")
