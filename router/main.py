"""The router process: its endpoints, its background tasks and its shutdown."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvrelay.clock import MonotonicClock
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Unavailable
from kvrelay.process.loop_stall import LoopStalls
from kvrelay.process.stop_request import DRAIN_GRACE_S, StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.state.registry import Registry
from kvrelay.tenants import ADMIN, CLIENT
from kvrelay.wire import cluster, inference
from router.api.grpc.admin import ClusterService
from router.api.grpc.auth import GrpcAccess
from router.api.grpc.bounds import field_bounds
from router.api.grpc.health import HealthService
from router.api.grpc.listener import GrpcListener
from router.api.grpc.messages import GrpcMessages
from router.api.grpc.service import InferenceService
from router.api.http.app import build_app
from router.api.http.server import http_server
from router.catalogue import Catalogue
from router.frontend.access import Access
from router.frontend.adapter_cards import AdapterCards
from router.frontend.model_card import ModelCard, ask_transformers
from router.frontend.rate_limits import Limits
from router.frontend.shared_bucket import shared_bucket
from router.frontend.tokenization import Text
from router.frontend.waiting_room import WaitingRoom
from router.observability.loop_metrics import LoopStallCollector
from router.process import allow_connections, end_after, favour_the_loop, settle_heap
from router.runtime.loop_slices import LoopSlices
from router.served_model import LoadedModel, RouterContext
from router.sibling_processes import Place, Siblings

# Time for the process to exit after its last request.
END_S = 5.0
# Part of it in which clients can read their last answers.
LAST_ANSWERS_S = 1.0

log = get_logger("router")


async def serve(
    config: ClusterConfig,
    *,
    folders: Sequence[str],
    ready: Callable[[str], None],
    place: Place | None = None,
) -> None:
    """Runs a router until a signal ends it.

    `folders` are those of the models that `config` serves. `place`: of this process among several
    that share the addresses. `ready` receives the line `kvrelay ready grpc=... http=... admin=...`
    once the configured number of workers is ready. Raises ConfigError if an address is not
    available, ModelRefused if a model folder cannot be read, and Unavailable if the registry is not
    reachable at the start.
    """
    stop = StopRequest()
    stop.install()
    end = asyncio.create_task(_end_in_time(stop))
    allow_connections()
    texts: list[Text] = []
    try:
        async with AsyncExitStack() as exits:
            models = []
            for one, folder in zip(config.served, folders, strict=True):
                card = ModelCard.load(folder, one.model, ask_transformers)
                card = replace(card, adapters=AdapterCards.load(one.adapters, card.info.id))
                texts.append(Text.load(folder, one.model.tool_format))
                registry = await exits.enter_async_context(await _connect(one))
                models.append(LoadedModel(one, registry, card, texts[-1]))
            for model in models:
                # Nobody waits for a model that sleeps from the start.
                if model.config.decode.replicas:
                    await model.text.warm_up()
            settle_heap()
            await run_router(config, models, ready, stop, Siblings(place))
    finally:
        stop.drain.set()
        for text in texts:
            await text.close()
        end.cancel()


async def _connect(config: ClusterConfig) -> Registry:
    """Connects to the registry of a model. Raises Unavailable."""
    return await Registry.connect(
        config.redis.url,
        namespace=config.redis.namespace,
        loopback_only=config.listen.workers_on_loopback,
    )


async def _end_in_time(stop: StopRequest) -> None:
    """Ends the process within the time that a stop request allows, even if a thread or the event
    loop is busy.
    """
    await stop.drain.wait()
    end_after(DRAIN_GRACE_S + END_S)
    await stop.halt.wait()
    end_after(END_S)


async def run_router(
    config: ClusterConfig,
    loaded: Sequence[LoadedModel],
    ready: Callable[[str], None],
    stop: StopRequest,
    siblings: Siblings | None = None,
) -> None:
    """Runs a router for these models until `stop` is set."""
    siblings = siblings or Siblings()
    is_shared = siblings.number is not None
    clock = MonotonicClock()
    credentials, endpoints = (
        Credentials.internal(config.security, "router"),
        Credentials.public(config.security),
    )
    if credentials is not None:
        for transport in {one.config.transfer.transport for one in loaded if _bypasses_tls(one)}:
            log.warning("kv_transfer_not_encrypted", transport=transport)
    tokens_file = config.security.tokens_file
    access = Access(None if tokens_file is None else Path(tokens_file))
    certificates = [one for one in (credentials, endpoints) if one is not None]
    context = RouterContext(
        router_id=f"router-{uuid.uuid4().hex[:8]}",
        clock=clock,
        access=access,
        limits=_limits(siblings),
        slices=LoopSlices(),
        siblings=siblings,
        credentials=credentials,
        troubles=(*(one.trouble for one in certificates), access.trouble),
    )
    catalogue = Catalogue(context, loaded)
    first = next(iter(catalogue))
    limits, slices = context.limits, context.slices
    stalls = LoopStalls("router")
    first.metrics.registry.register(LoopStallCollector(first.name, "router", stalls.counts))
    waiting_room = WaitingRoom(clock)

    bounds = field_bounds(max(one.card.info.max_model_len for one in catalogue))
    healthy = HealthService((inference.SERVICE_NAME,), serving=False)
    public = GrpcListener(
        config.listen.grpc,
        "listen.grpc",
        (inference.SERVICE_NAME,),
        healthy,
        GrpcAccess(access, CLIENT, waiting_room),
        GrpcMessages(bounds, slices),
        endpoints,
        is_shared=is_shared,
    )
    admin = GrpcListener(
        config.listen.admin,
        "listen.admin",
        (cluster.SERVICE_NAME,),
        HealthService((cluster.SERVICE_NAME,), serving=True),
        GrpcAccess(access, ADMIN, waiting_room),
        GrpcMessages(bounds, slices),
        endpoints,
        is_shared=is_shared,
    )
    app = build_app(catalogue, context, waiting_room, config.listen.http)
    http, http_address = http_server(
        app, config.listen.http, "listen.http", endpoints, is_shared=is_shared
    )
    public.add(
        inference.add_InferenceServiceServicer_to_server,
        InferenceService(catalogue, clock, waiting_room),
    )
    admin.add(cluster.add_ClusterServiceServicer_to_server, ClusterService(catalogue))

    scheme = "http" if endpoints is None else "https"

    async def announce() -> None:
        """Updates gRPC's health service when the state changes. Calls `ready` once, when the router
        is ready. No request shall wait for the process that tries out guidance.
        """
        for one in catalogue:
            await one.warm_up()
        announced = False
        while True:
            await catalogue.changed()
            state = catalogue.state
            healthy.set(serving=state == "ready")
            if state == "ready" and not announced:
                announced = True
                log.info("router_ready", pid=os.getpid())
                ready(
                    f"kvrelay ready grpc={public.address} http={scheme}://{http_address} "
                    f"admin={admin.address}"
                )

    def tenants_changed() -> None:
        limits.keep(access.names)
        waiting_room.keep(access.names)
        for one in catalogue:
            one.tenant_metrics.keep(access.names)

    async with asyncio.TaskGroup() as tasks:
        await public.start()
        await admin.start()
        favour_the_loop()
        watches = (access.watch(tenants_changed), stalls.run(), siblings.run(), announce())
        loops = [tasks.create_task(one) for one in (*(one.run() for one in catalogue), *watches)]
        web = tasks.create_task(http.serve())
        await stop.drain.wait()
        log.info("draining", requests=sum(one.driver.dispatcher.unfinished for one in catalogue))
        await _drain(catalogue, stop)
        http.should_exit = True
        await asyncio.gather(public.stop(LAST_ANSWERS_S), admin.stop(LAST_ANSWERS_S), web)
        for task in loops:
            task.cancel()
    for one in catalogue:
        await one.close()


def _limits(siblings: Siblings) -> Limits:
    """Returns the tenants' limits, which the processes of a router share."""
    if siblings.folder is None:
        return Limits()
    return Limits(partial(shared_bucket, siblings.folder))


def _bypasses_tls(loaded: LoadedModel) -> bool:
    return loaded.config.transfer.bypasses_tls


async def _drain(catalogue: Catalogue, stop: StopRequest) -> None:
    """Waits until the last request has ended, DRAIN_GRACE_S is over, or a second signal arrives.
    Then fails the remaining requests.
    """

    async def drained() -> None:
        await asyncio.gather(*(one.driver.drained() for one in catalogue))

    waits = [asyncio.create_task(drained()), asyncio.create_task(stop.halt.wait())]
    await asyncio.wait(waits, timeout=DRAIN_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    for one in catalogue:
        one.driver.abandon(
            Unavailable(
                "the router is shutting down; resume at another router with the received tokens",
                retry_after_s=1.0,
            )
        )
