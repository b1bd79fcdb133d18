"""The target of a test, and the sources of information about its internal state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvrelay.client.admin import AdminClient
from kvrelay.client.connection import Connection
from kvrelay.errors import InvalidArgument, KvRelayError, NotFound, PermissionDenied
from kvrelay.loadtest.counters import PrefixCache, read_counters
from kvrelay.loadtest.runner import Sender
from kvrelay.loadtest.senders.grpc_sender import GrpcSender
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.wire.inference import ModelInfo

STATUS_TIMEOUT_S = 2.0
# For a target that does not report its block size; the default of most engines.
BLOCK_TOKENS = 16
# Models that an error names.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Target:
    """A target, and the optional sources of information about it."""

    sender: Sender
    model: ModelInfo
    admin: AdminClient | None = None
    metrics: HttpSender | None = None
    # Block size of the target's prefix cache.
    block_tokens: int = BLOCK_TOKENS
    # Why something about the target is unknown; empty otherwise.
    note: str = ""

    async def counters(self) -> PrefixCache | None:
        """Returns the target's counters; None if it has none. Raises KvRelayError if metrics that
        were available are not any more.
        """
        return None if self.metrics is None else read_counters(await self.metrics.metrics())


@asynccontextmanager
async def open_target(
    address: str,
    timeout: float,  # noqa: ASYNC109 - of each request
    admin: str | None,
    metrics: str | None,
    connection: Connection,
    model: str = "",
) -> AsyncIterator[Target]:
    """Opens a target. address: HOST:PORT, http://HOST:PORT or https://HOST:PORT, with or without
    /v1. admin: HOST:PORT. metrics: the http address of the same server, with or without http:// and
    /metrics. model: the name of one of its models, by default of the first.

    Sources that are not given are probed: the port after a gRPC target's port, which is the default
    of a cluster's admin listener, and /metrics of an HTTP target. With a token without the role
    admin, only the timeline is missing. Raises KvRelayError if the target or a given source does
    not answer.
    """
    kind: type[HttpSender] | type[GrpcSender] = HttpSender if "://" in address else GrpcSender
    async with AsyncExitStack() as stack:
        sender = kind(address, timeout, connection)
        await stack.enter_async_context(sender)
        client = None if admin is None else stack.enter_context(_admin(admin, connection, model))
        exposition = None
        if metrics is not None:
            url = metrics if "://" in metrics else f"http://{metrics}"
            exposition = HttpSender(url, STATUS_TIMEOUT_S, connection, "/metrics")
        found = _named(await sender.models(), model, address)
        # Routers of one model take requests without a name, which older ones expect.
        sender.model = found.id if model or isinstance(sender, HttpSender) else ""
        if client is None and isinstance(sender, GrpcSender):
            client = await asyncio.to_thread(_neighbour, address, found.id, connection)
            if client is not None:
                stack.enter_context(client)
        if exposition is not None:
            await exposition.metrics()
        elif isinstance(sender, HttpSender):
            exposition = await _own_metrics(sender)
        block_tokens, note = BLOCK_TOKENS, ""
        if client is not None:
            try:
                block_tokens = (await asyncio.to_thread(client.status)).block_size
            except PermissionDenied as error:
                client, note = None, f"no timeline of the cluster: {error.message}"
        yield Target(sender, found, client, exposition, block_tokens, note)


def _named(models: Sequence[ModelInfo], name: str, address: str) -> ModelInfo:
    """Returns the model with this name, or without a name the first. Raises NotFound, and
    InvalidArgument if there are several without a name.
    """
    if not models:
        raise NotFound(f"{address} serves no model")
    served = ", ".join(one.id for one in models[:_SHOWN]) + ", ..." * (len(models) > _SHOWN)
    if name:
        for one in models:
            if one.id == name:
                return one
        raise NotFound(f"{address} does not serve {name!r:.100}; it serves {served}")
    # An adapter is listed after its base model.
    bases = [one for one in models if not one.parent]
    if len(bases) > 1:
        raise InvalidArgument(
            f"{address} serves several models; name one with --model: {served}", field="model"
        )
    return models[0]


def _admin(address: str, connection: Connection, model: str = "") -> AdminClient:
    return AdminClient(
        address,
        timeout=STATUS_TIMEOUT_S,
        token=connection.token(),
        tls=connection.tls(),
        model=model,
    )


def _neighbour(address: str, model: str, connection: Connection) -> AdminClient | None:
    """Returns a client of the admin listener at the next port. Returns None if there is no
    listener, or if it serves another model. Blocks until the listener answers.
    """
    host, _, port = address.rpartition(":")
    client = _admin(f"{host}:{int(port) % 65535 + 1}", connection, model)
    try:
        found = client.status().model == model
    except KvRelayError:
        # The listener is only a guess, so an error is no failure.
        found = False
    if found:
        return client
    client.close()
    return None


async def _own_metrics(sender: HttpSender) -> HttpSender | None:
    try:
        await sender.metrics()
    except KvRelayError:
        # The metrics are only a guess, so an error is no failure.
        return None
    return sender
