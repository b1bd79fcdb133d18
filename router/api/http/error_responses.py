"""Error responses, in the shape of OpenAI's or Anthropic's API.

`kvrelay.errors.Code` has the table of codes and HTTP statuses.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvrelay.errors import Code, Internal, KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.tenants import CLIENT, Role
from router.api.http.dialects.anthropic import errors as anthropic_errors
from router.api.http.dialects.openai import errors as openai_errors
from router.api.http.encoding import to_json
from router.frontend.access import check_role
from router.frontend.validation import check_request_id

# Route of Anthropic's dialect.
ANTHROPIC = "/v1/messages"

# Characters of what an error repeats.
_MAX_PATH = 100
_MAX_METHOD = 20

_MORE_TIME = "the operator may raise router.default_deadline_s"

Handler = Callable[[Request], Awaitable[Response]]

log = get_logger("router.http")


def typed(handler: Handler, roles: frozenset[Role] = CLIENT) -> Handler:
    """Wraps a handler for callers with one of the roles. Sets the request's id and answers errors
    in the shape of the route.
    """

    async def handle(request: Request) -> Response:
        given, path = request.headers.get("x-request-id", ""), request.scope["path"]
        request_id = request.state.request_id = given or new_request_id()
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
                request_id = new_request_id()
            response = error_response(error, path, request_id)
        except Exception:
            log.exception("unexpected_error", request=request_id)
            response = error_response(unexpected(request_id), path, request_id)
        response.headers["x-request-id"] = request_id
        if is_anthropic(path):
            response.headers["request-id"] = request_id
        return response

    return handle


def new_request_id() -> str:
    """Returns an id for a request that has none."""
    return uuid.uuid4().hex


def is_anthropic(path: str) -> bool:
    """Whether errors of the route have Anthropic's shape."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def error_response(error: KvRelayError, path: str, request_id: str) -> Response:
    """Returns the HTTP response for the error of a request for the path, with its status and
    headers.
    """
    if error.code is Code.DEADLINE_EXCEEDED:
        # HTTP requests have no deadline of their own.
        error.message = error.message.replace("send a later deadline", _MORE_TIME)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.code is Code.UNIMPLEMENTED:
        # OpenAI's clients retry after other 5xx statuses.
        headers["x-should-retry"] = "false"
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if is_anthropic(path):
        body = anthropic_errors.error_body(error, request_id)
        return _json(body, anthropic_errors.status_of(error.code), headers)
    return _json(openai_errors.error_body(error), error.code.http_status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    """Returns the response to an HTTPException: unknown path, wrong method, or a body that is too
    large or too slow.
    """
    assert isinstance(error, HTTPException)
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        error = HTTPException(error.status_code, _no_route(request, error), error.headers)
    request_id = getattr(request.state, "request_id", "") or _given_id(request)
    if is_anthropic(request.scope["path"]):
        body = anthropic_errors.http_error_body(error, request_id)
    else:
        body = openai_errors.http_error_body(error)
    headers = {**(error.headers or {}), "x-request-id": request_id}
    if is_anthropic(request.scope["path"]):
        headers["request-id"] = request_id
    return _json(body, error.status_code, headers)


def _given_id(request: Request) -> str:
    """Returns the client's id of the request if it is valid, and a new one if not."""
    given = request.headers.get("x-request-id", "")
    try:
        check_request_id(given)
    except KvRelayError:
        return new_request_id()
    return given or new_request_id()


def _no_route(request: Request, error: HTTPException) -> str:
    """Returns what to do about a path or a method that does not exist."""
    path: str = request.scope["path"][:_MAX_PATH]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} does not accept {request.method[:_MAX_METHOD]}; use {allowed}"
    near = get_close_matches(path, [route.path for route in request.app.routes], n=1, cutoff=0.75)
    advice = f"did you mean {near[0]}?" if near else "/openapi.json lists what does"
    return f"{path} does not exist; {advice}"


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
