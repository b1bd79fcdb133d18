"""The router process: its endpoints, its background tasks and its shutdown."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
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
from router.api.grpc.messages import GrpcMessages
from router.api.grpc.service import InferenceService
from router.api.http.app import build_app
from router.api.listeners import grpc_server, http_server
from router.frontend.access import Access
from router.frontend.adapter_cards import AdapterCards
from router.frontend.adapter_operations import AdapterOperations
from router.frontend.frontend import Frontend
from router.frontend.model_card import ModelCard, ask_transformers
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text
from router.frontend.waiting_room import WaitingRoom
from router.observability.dashboard import StatusPage
from router.observability.defence_metrics import DefenceCollector
from router.observability.heartbeat import Heartbeat
from router.observability.index_metrics import IndexCollector
from router.observability.loop_metrics import LoopStallCollector
from router.observability.metrics import ClusterCollector, Metrics
from router.observability.observers import Observers
from router.observability.request_log import RequestLog
from router.observability.status import ClusterView
from router.observability.tenant_metrics import TenantMetrics
from router.observability.tracing import Tracing
from router.process import allow_connections, end_after, favour_the_loop, settle_heap
from router.runtime.driver import Driver
from router.runtime.loop_slices import LoopSlices
from router.runtime.pool_changes import follow_changes
from router.runtime.worker_directory import RouterRegistry

# Time for the process to exit after its last request.
END_S = 5.0
# Part of it in which clients can read their last answers.
LAST_ANSWERS_S = 1.0

log = get_logger("router")


async def serve(
    config: ClusterConfig, *, redis_url: str, model_path: str, ready: Callable[[str], None]
) -> None:
    """Runs a router until a signal ends it.

    `ready` receives the line `kvrelay ready grpc=... http=... admin=...` once the configured number
    of workers is ready. Raises ConfigError if an address is not available, ModelRefused if the
    model folder cannot be read, and Unavailable if the registry is not reachable at the start.
    """
    stop = StopRequest()
    stop.install()
    end = asyncio.create_task(_end_in_time(stop))
    allow_connections()
    card = ModelCard.load(model_path, config.model, ask_transformers)
    card = replace(card, adapters=AdapterCards.load(config.adapters, card.info.id))
    text = Text.load(model_path, config.model.tool_format)
    try:
        async with await Registry.connect(
            redis_url, loopback_only=config.listen.workers_on_loopback
        ) as registry:
            await text.warm_up()
            settle_heap()
            await run_router(config, registry, card, text, ready, stop)
    finally:
        stop.drain.set()
        await text.close()
        end.cancel()


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
    registry: RouterRegistry,
    card: ModelCard,
    text: Text,
    ready: Callable[[str], None],
    stop: StopRequest,
) -> None:
    """Runs a router with the given parts until `stop` is set."""
    clock = MonotonicClock()
    router_id = f"router-{uuid.uuid4().hex[:8]}"
    metrics = Metrics(card.info.id)
    tracing = Tracing.from_environment(card.info.id, clock)
    credentials, endpoints = (
        Credentials.internal(config.security, "router"),
        Credentials.public(config.security),
    )
    if credentials is not None and config.transfer.bypasses_tls:
        log.warning(
            "kv_transfer_not_encrypted",
            transport=config.transfer.transport,
        )
    certificates = [one for one in (credentials, endpoints) if one is not None]
    tokens_file = config.security.tokens_file
    access = Access(None if tokens_file is None else Path(tokens_file))
    limits = Limits()
    tenant_metrics = TenantMetrics(card.info.id, access, limits)
    observers = Observers(metrics, RequestLog(), tracing, limits, tenant_metrics)
    driver = Driver(config, registry, router_id, clock, observers, credentials, card.misfit)
    metrics.registry.register(ClusterCollector(card.info.id, driver, metrics))
    metrics.registry.register(DefenceCollector(card.info.id, driver.dispatcher))
    metrics.registry.register(IndexCollector(card.info.id, driver.dispatcher))
    stalls = LoopStalls("router")
    metrics.registry.register(LoopStallCollector(card.info.id, "router", stalls.counts))
    slices = LoopSlices()
    frontend = Frontend(card, text, driver, limits, config.router, clock, slices)
    heartbeat = Heartbeat(router_id, driver, metrics, registry, clock, certificates)
    view = ClusterView(driver, registry, heartbeat, card.info.id, config)
    operations = AdapterOperations(
        card.info.id, card.adapters, config.adapters, registry, lambda: driver.known
    )
    waiting_room = WaitingRoom(clock)
    page = StatusPage(frontend, driver, metrics, view, clock)

    bounds = field_bounds(card.info.max_model_len)
    healthy = HealthService((inference.SERVICE_NAME,), serving=False)
    public, grpc_address = grpc_server(
        config.listen.grpc,
        "listen.grpc",
        (inference.SERVICE_NAME,),
        healthy,
        GrpcAccess(access, CLIENT, waiting_room),
        GrpcMessages(bounds, slices),
        endpoints,
    )
    admin, admin_address = grpc_server(
        config.listen.admin,
        "listen.admin",
        (cluster.SERVICE_NAME,),
        HealthService((cluster.SERVICE_NAME,), serving=True),
        GrpcAccess(access, ADMIN, waiting_room),
        GrpcMessages(bounds, slices),
        endpoints,
    )
    app = build_app(
        frontend,
        driver,
        metrics,
        tenant_metrics,
        clock,
        page,
        access,
        waiting_room,
        config.listen.http,
        slices,
    )
    http, http_address = http_server(app, config.listen.http, "listen.http", endpoints)
    inference.add_InferenceServiceServicer_to_server(
        InferenceService(frontend, clock, waiting_room), public
    )
    cluster.add_ClusterServiceServicer_to_server(
        ClusterService(driver, registry, view, operations), admin
    )

    scheme = "http" if endpoints is None else "https"

    async def announce() -> None:
        """Updates gRPC's health service when the state changes. Calls `ready` once, when the router
        is ready. No request shall wait for the process that tries out guidance.
        """
        await frontend.guidance.warm_up()
        announced = False
        while True:
            await driver.changed.wait()
            driver.changed.clear()
            state = driver.state
            healthy.set(serving=state == "ready")
            if state == "ready" and not announced:
                announced = True
                ready(
                    f"kvrelay ready grpc={grpc_address} http={scheme}://{http_address} "
                    f"admin={admin_address}"
                )

    def tenants_changed() -> None:
        limits.keep(access.names)
        waiting_room.keep(access.names)
        tenant_metrics.keep(access.names)

    async with asyncio.TaskGroup() as tasks:
        await public.start()
        await admin.start()
        favour_the_loop()
        watches = (access.watch(tenants_changed), follow_changes(registry, driver), stalls.run())
        runs = (driver.run(), heartbeat.run(), page.run(), announce(), operations.run(), *watches)
        loops = [tasks.create_task(one) for one in runs]
        web = tasks.create_task(http.serve())
        await stop.drain.wait()
        log.info("draining", requests=driver.dispatcher.unfinished)
        await _drain(driver, stop)
        http.should_exit = True
        await asyncio.gather(public.stop(LAST_ANSWERS_S), admin.stop(LAST_ANSWERS_S), web)
        for task in loops:
            task.cancel()
    await frontend.guidance.close()
    await heartbeat.end()
    await tracing.close()


async def _drain(driver: Driver, stop: StopRequest) -> None:
    """Waits until the last request has ended, DRAIN_GRACE_S is over, or a second signal arrives.
    Then fails the remaining requests.
    """
    waits = [asyncio.create_task(driver.drained()), asyncio.create_task(stop.halt.wait())]
    await asyncio.wait(waits, timeout=DRAIN_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    driver.abandon(
        Unavailable(
            "the router is shutting down; resume at another router with the received tokens",
            retry_after_s=1.0,
        )
    )
