"""HTTP pacing: one tenant's polls and errors must not take the event loop from other tenants."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.errors import KvRelayError, ResourceExhausted
from kvrelay.tenants import Tenant
from router.api.http.connections.connection import MAX_CONNECTIONS
from router.api.http.error_responses import error_response, new_request_id
from router.frontend.waiting_room import InProgress, WaitingRoom

# Limit on concurrent requests of one tenant, so that no tenant takes all connections.
MAX_REQUESTS = MAX_CONNECTIONS // 4


class HttpPace:
    """ASGI middleware that delays polls and errors to the tenant's pace. It runs behind
    `HttpAccess`, which sets the tenant. The endpoint sets the number of choices that a request asks
    for.
    """

    def __init__(self, app: ASGIApp, waiting_room: WaitingRoom) -> None:
        self._app = app
        self._waiting_room = waiting_room
        self._running = InProgress()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the app at the tenant's pace, or answers 429 above MAX_REQUESTS."""
        tenant: Tenant = scope["state"]["tenant"]
        # Without tokens there is a single tenant.
        if not tenant.name:
            await self._app(scope, receive, send)
            return
        begun = self._running.begin(tenant.name, MAX_REQUESTS)
        try:
            await self._paced(tenant, begun, scope, receive, send)
        finally:
            if begun:
                self._running.end(tenant.name)

    async def _paced(
        self, tenant: Tenant, begun: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        poll = scope["method"] != "POST"
        if begun:
            await self._waiting_room.tenant(tenant.name, poll)

        served = False

        async def watched(message: Message) -> None:
            nonlocal served
            if message["type"] == "http.response.start":
                served = message["status"] < 400
            await send(message)

        try:
            if begun:
                await self._app(scope, receive, watched)
            else:
                await self._refuse(tenant, scope, receive, watched)
        finally:
            # An error, or a client that has gone without an answer.
            if not (served or poll):
                self._waiting_room.refused(tenant.name, scope["state"].get("choices", 1))

    async def _refuse(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        error: KvRelayError = ResourceExhausted(
            f"tenant {tenant.name} has {MAX_REQUESTS} HTTP requests in progress on this "
            "router; wait until some have ended, or use another router",
            retry_after_s=1.0,
        )
        await error_response(error, scope["path"], new_request_id())(scope, receive, send)
