"""Authentication on gRPC: every method of a listener, whoever registered it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.errors import KvRelayError
from kvrelay.tenants import Role, Tenant
from kvrelay.wire import inference, status
from router.frontend.access import Access
from router.frontend.waiting_room import WaitingRoom

# A kubelet's probe cannot send a token. The answer is one word; Watch, which holds a stream open,
# needs a token.
OPEN_METHOD = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"

GENERATE = f"/{inference.SERVICE_NAME}/Generate"  # refusals of it are counted by the service

caller: ContextVar[Tenant] = ContextVar("caller")  # of the method that runs


class GrpcAccess(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types
    """Lets those in who have one of `roles`; polls and refusals come at the tenant's pace."""

    def __init__(self, access: Access, roles: frozenset[Role], waiting_room: WaitingRoom) -> None:
        self._access = access
        self._roles = roles
        self._waiting_room = waiting_room

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        if details.method != OPEN_METHOD:
            given = [
                str(value) for key, value in details.invocation_metadata if key == "authorization"
            ]
            try:
                tenant = self._access.admit(given, self._roles)
            except KvRelayError as error:
                # With too many waiting, the refusal comes at once: gRPC cannot close the caller's
                # connection.
                await self._waiting_room.stranger()
                return _refusing(error)
            caller.set(tenant)
            if tenant.name:
                await self._waiting_room.tenant(tenant.name, poll=details.method != GENERATE)
        return await continuation(details)


def _refusing(error: KvRelayError) -> Any:
    """Of the kind that waits for no message: a stranger who sends none holds nothing open."""

    async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
        await status.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
