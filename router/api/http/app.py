"""The ASGI application of the HTTP port: its routes and guards."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from kvrelay.tenants import ANY_ROLE
from router.api.http.auth import HttpAccess
from router.api.http.connections.pacing import HttpPace
from router.api.http.dialects.anthropic.requests import parse_messages
from router.api.http.dialects.anthropic.shape import MessagesShape
from router.api.http.dialects.dialect import Dialect
from router.api.http.dialects.openai.requests import parse_chat, parse_completion
from router.api.http.dialects.openai.shape import OpenAiShape
from router.api.http.dialects.responses.requests import parse_response
from router.api.http.dialects.responses.shape import PREFIX, ResponseShape
from router.api.http.endpoint import HttpEndpoint
from router.api.http.error_responses import http_error, typed
from router.catalogue import Catalogue
from router.frontend.waiting_room import WaitingRoom
from router.observability.dashboard import page_files
from router.served_model import RouterContext

# The routes that generate text.
DIALECTS = {
    "/v1/completions": Dialect("cmpl-", parse_completion, OpenAiShape),
    "/v1/chat/completions": Dialect("chatcmpl-", parse_chat, OpenAiShape),
    "/v1/responses": Dialect(PREFIX, parse_response, ResponseShape),
    "/v1/messages": Dialect("msg_", parse_messages, MessagesShape),
}


def build_app(
    catalogue: Catalogue, context: RouterContext, waiting_room: WaitingRoom, address: str
) -> Starlette:
    """Builds the ASGI application. `address` is the listener's HOST:PORT."""
    endpoint = HttpEndpoint(catalogue, context)
    # Probes and browsers' address bars send no token. These routes reveal nothing about requests or
    # tenants.
    in_the_open = [Route("/health", typed(endpoint.health), methods=["GET"]), *page_files()]
    routes = [
        *in_the_open,
        Route("/v1/models", typed(endpoint.models), methods=["GET"]),
        Route("/v1/models/{id:path}", typed(endpoint.model), methods=["GET"]),
        *(
            Route(path, typed(endpoint.generating(dialect)), methods=["POST"])
            for path, dialect in DIALECTS.items()
        ),
        Route("/v1/messages/count_tokens", typed(endpoint.count_tokens), methods=["POST"]),
        Route("/tokenize", typed(endpoint.tokenize), methods=["POST"]),
        Route("/detokenize", typed(endpoint.detokenize), methods=["POST"]),
        Route("/metrics", typed(endpoint.metrics, ANY_ROLE), methods=["GET"]),
        Route("/version", typed(endpoint.version, ANY_ROLE), methods=["GET"]),
        Route("/openapi.json", typed(endpoint.openapi, ANY_ROLE), methods=["GET"]),
        Route("/status.json", typed(endpoint.status, ANY_ROLE), methods=["GET"]),
    ]
    open_paths = [one.path for one in in_the_open]
    guards = [
        Middleware(
            HttpAccess,
            access=context.access,
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
