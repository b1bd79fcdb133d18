"""gRPC authentication. It covers every method of a listener."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.errors import KvRelayError, ResourceExhausted
from kvrelay.tenants import Role, Tenant
from kvrelay.wire import inference, status
from router.frontend.access import Access
from router.frontend.waiting_room import InProgress, WaitingRoom

# A kubelet's probe cannot send a token. Check returns only a status and is open; Watch holds a
# stream open and needs a token.
OPEN_METHOD = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"

# The service counts the errors of this method itself.
GENERATE = f"/{inference.SERVICE_NAME}/Generate"

# Limit on concurrent calls of one tenant, on one listener.
MAX_CALLS = 1024

# Tenant of the running method.
caller: ContextVar[Tenant] = ContextVar("caller")


class GrpcAccess(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Admits callers that have one of `roles`. Polls and authentication errors are delayed to the
    tenant's pace.
    """

    def __init__(self, access: Access, roles: frozenset[Role], waiting_room: WaitingRoom) -> None:
        self._access = access
        self._roles = roles
        self._waiting_room = waiting_room
        self._running = InProgress()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Authenticates the call and sets `caller`. Unauthenticated calls get a handler that
        fails.
        """
        if details.method != OPEN_METHOD:
            given = [
                str(value) for key, value in details.invocation_metadata if key == "authorization"
            ]
            try:
                tenant = self._access.admit(given, self._roles)
            except KvRelayError as error:
                # If too many callers wait, the error is sent at once: gRPC cannot close the
                # caller's connection.
                await self._waiting_room.stranger()
                return _refusing(error)
            caller.set(tenant)
            # Without tokens there is a single tenant.
            if tenant.name:
                begun = self._begin(tenant)
                poll = not begun or details.method != GENERATE
                await self._waiting_room.tenant(tenant.name, poll=poll)
                if not begun:
                    return _refusing(_too_many(tenant))
        return await continuation(details)

    def _begin(self, tenant: Tenant) -> bool:
        """Counts the tenant's call until its task ends, also if no handler runs. Returns False if
        MAX_CALLS are in progress.
        """
        if not self._running.begin(tenant.name, MAX_CALLS):
            return False
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._running.end(tenant.name))
        return True


def _too_many(tenant: Tenant) -> KvRelayError:
    return ResourceExhausted(
        f"tenant {tenant.name} has {MAX_CALLS} gRPC calls in progress on this router; wait until "
        "some have ended, or use another router",
        retry_after_s=1.0,
    )


def _refusing(error: KvRelayError) -> Any:
    """Returns a handler that fails without reading a message, so that a caller that sends no
    message holds nothing open.
    """

    async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
        status.set_status(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
