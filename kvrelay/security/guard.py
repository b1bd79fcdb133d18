"""Authorises calls: checks the role in the peer's certificate against a table of services."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
from cryptography import x509

from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unauthenticated
from kvrelay.process.telemetry import get_logger
from kvrelay.security.tls_roles import ROLES, Role, roles_of
from kvrelay.wire import status

log = get_logger("security")

ALLOWED: Mapping[str, tuple[Role, ...]] = {
    # Controllers use a router's certificate; they drain workers.
    "kvrelay.v1.WorkerService": ("router",),
    "kvrelay.v1.KvTransferService": ("worker",),
    # A store uses a worker's certificate too.
    "kvrelay.v1.KvStoreService": ("worker",),
    "kvrelay.v1.ClusterService": ("admin",),
    "kvrelay.v1.InferenceService": ("client", "admin"),
    "grpc.reflection.v1alpha.ServerReflection": ("client", "admin"),
    "grpc.health.v1.Health": ROLES,
}
"""A service that is not here is nobody's."""


@dataclass(frozen=True, slots=True)
class _Peer:
    """The peer of a call, as its certificate identifies it."""

    name: str
    role: Role
    ends: datetime


class RoleGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects calls from the wrong role before their handler runs, and before their messages are
    read.

    For servers that require certificates: a peer without a certificate, or with a certificate of
    another CA, fails the TLS handshake. `without_role` is the role of a certificate that names no
    role; None rejects such a certificate.
    """

    def __init__(self, without_role: Role | None = None) -> None:
        self._without_role = without_role
        # Calls in progress, by the id of their context.
        self._calls: dict[int, _Peer] = {}
        self._told: set[_Peer] = set()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of a call with the check of the role."""
        handler = await continuation(details)
        return None if handler is None else self._guarded(handler, details.method)

    def tell_of_ended(self, now: datetime | None = None) -> None:
        """Logs once for each peer with a call in progress whose certificate has expired."""
        now = now or datetime.now(UTC)
        ended = {peer for peer in self._calls.values() if peer.ends <= now}
        for peer in ended - self._told:
            log.warning(
                "peer_certificate_expired",
                peer=peer.name,
                role=peer.role,
                ended=peer.ends.isoformat(),
            )
        self._told = ended

    def _guarded(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        asks = "stream" if handler.request_streaming else "unary"
        answers_with = "stream" if handler.response_streaming else "unary"
        inner = getattr(handler, f"{asks}_{answers_with}")
        given = _all if handler.request_streaming else _only

        async def answer(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._admitted(await self._peer(context, method), context):
                return await inner(await given(requests, context), context)

        async def answers(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._admitted(await self._peer(context, method), context):
                async with aclosing(inner(await given(requests, context), context)) as responses:
                    async for response in responses:
                        yield response

        # gRPC reads the message of a unary call before its handler runs, and that of a stream when
        # the handler asks for it. On the wire they are the same.
        make = getattr(grpc, f"stream_{answers_with}_rpc_method_handler")
        guarded = answers if inspect.isasyncgenfunction(inner) else answer
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    @contextmanager
    def _admitted(self, peer: _Peer, context: grpc.aio.ServicerContext) -> Iterator[None]:
        self._calls[id(context)] = peer
        try:
            yield
        finally:
            del self._calls[id(context)]

    async def _peer(self, context: grpc.aio.ServicerContext, method: str) -> _Peer:
        """Returns the peer. Aborts the call if the peer may not call the method."""
        try:
            return self._check(context.auth_context(), context.peer(), method)
        except KvRelayError as error:
            log.warning("call_refused", peer=context.peer(), method=method, reason=error.message)
            await status.abort(context, error)

    def _check(self, auth: Mapping[str, Any], name: str, method: str) -> _Peer:
        shown = tuple(auth.get("x509_pem_cert", ()))
        if not shown:
            raise Unauthenticated(f"{method} requires a client certificate")
        roles, ends = _read(shown[0])
        names_none = not roles
        if names_none and self._without_role is not None:
            roles = (self._without_role,)
        if len(roles) != 1:
            raise Unauthenticated(
                f"the certificate has {len(roles)} roles; it must have exactly one, as the URI "
                "kvrelay://role/NAME"
            )
        allowed = ALLOWED.get(method.strip("/").rpartition("/")[0], ())
        if roles[0] not in allowed:
            has = f"names none, which counts as {roles[0]}" if names_none else f"has {roles[0]}"
            raise PermissionDenied(
                f"{method} requires the role {' or '.join(allowed) or 'of nobody'}, and the "
                f"certificate {has}"
            )
        return _Peer(name, roles[0], ends)


async def _all(requests: AsyncIterator[Any], _: grpc.aio.ServicerContext) -> Any:
    """Returns the messages of a stream."""
    return requests


async def _only(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
    """Returns the message of a unary call. Aborts a call without one."""
    if (request := await anext(requests, None)) is None:
        await status.abort(context, InvalidArgument("the call has no message"))
    return request


@functools.lru_cache(maxsize=256)
def _read(pem: bytes) -> tuple[tuple[Role, ...], datetime]:
    certificate = x509.load_pem_x509_certificate(pem)
    return roles_of(certificate), certificate.not_valid_after_utc
