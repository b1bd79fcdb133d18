"""What a test is aimed at, and who can tell what goes on inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvrelay.client.admin import AdminClient
from kvrelay.client.connection import Connection
from kvrelay.errors import KvRelayError, NotFound, PermissionDenied
from kvrelay.loadtest.counters import PrefixCache, read_counters
from kvrelay.loadtest.runner import Sender
from kvrelay.loadtest.senders.grpc_sender import GrpcSender
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.wire.inference import ModelInfo

STATUS_TIMEOUT_S = 2.0
BLOCK_TOKENS = 16  # of a target that does not say; most engines' default


@dataclass(frozen=True, slots=True)
class Target:
    sender: Sender
    model: ModelInfo
    admin: AdminClient | None = None
    metrics: HttpSender | None = None
    block_tokens: int = BLOCK_TOKENS  # of its prefix cache
    note: str = ""  # why something about the target is not known, or nothing

    async def counters(self) -> PrefixCache | None:
        """None if it has none. Raises KvRelayError if its metrics were there and are not any
        more.
        """
        return None if self.metrics is None else read_counters(await self.metrics.metrics())


@asynccontextmanager
async def open_target(
    address: str,
    timeout: float,  # noqa: ASYNC109 - of each request
    admin: str | None,
    metrics: str | None,
    connection: Connection,
) -> AsyncIterator[Target]:
    """address: HOST:PORT, http://HOST:PORT or https://HOST:PORT. admin: HOST:PORT. metrics: as
    http, the same server's.

    What is not given is tried: the port after a gRPC target's, where a cluster's admin listener is
    by default, and an HTTP target's /metrics. A token without the role admin costs the timeline
    only. Raises KvRelayError if the target or what was given does not answer.
    """
    kind: type[HttpSender] | type[GrpcSender] = HttpSender if "://" in address else GrpcSender
    async with AsyncExitStack() as stack:
        sender = kind(address, timeout, connection)
        await stack.enter_async_context(sender)
        client = None if admin is None else stack.enter_context(_admin(admin, connection))
        exposition = None if metrics is None else HttpSender(metrics, STATUS_TIMEOUT_S, connection)
        models = await sender.models()
        if not models:
            raise NotFound(f"{address} serves no model")
        if client is None and isinstance(sender, GrpcSender):
            client = _neighbour(address, models[0].id, connection)
            if client is not None:
                stack.enter_context(client)
        if exposition is not None:
            await exposition.metrics()
        elif isinstance(sender, HttpSender):
            exposition = await _own_metrics(sender)
        block_tokens, note = BLOCK_TOKENS, ""
        if client is not None:
            try:
                block_tokens = client.status().block_size
            except PermissionDenied as error:
                client, note = None, f"no timeline of the cluster: {error.message}"
        yield Target(sender, models[0], client, exposition, block_tokens, note)


def _admin(address: str, connection: Connection) -> AdminClient:
    return AdminClient(
        address, timeout=STATUS_TIMEOUT_S, token=connection.token(), tls=connection.tls()
    )


def _neighbour(address: str, model: str, connection: Connection) -> AdminClient | None:
    """The client of the admin listener that has the next port, if there is one and it is of the
    same model.
    """
    host, _, port = address.rpartition(":")
    client = _admin(f"{host}:{int(port) % 65535 + 1}", connection)
    try:
        found = client.status().model == model
    except KvRelayError:
        found = False  # nobody said that there is one
    if found:
        return client
    client.close()
    return None


async def _own_metrics(sender: HttpSender) -> HttpSender | None:
    try:
        await sender.metrics()
    except KvRelayError:
        return None  # nobody said that it has any
    return sender
