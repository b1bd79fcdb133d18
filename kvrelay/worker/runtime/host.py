"""Runs one worker, with its gRPC server, step loop and heartbeat, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import grpc

from kv_transfer.channels import message_bytes
from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.kvcache.window_parts import BlockUnits
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import Unavailable
from kvrelay.process.stop_request import DRAIN_GRACE_S, StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.guard import RoleGuard
from kvrelay.state.registry import Registry
from kvrelay.wire.transfer import add_kv_transfer_servicer
from kvrelay.wire.worker import add_WorkerServiceServicer_to_server
from kvrelay.worker.context import Identity, WorkerContext
from kvrelay.worker.runtime.adapter_loading import AdapterLoading
from kvrelay.worker.runtime.cores import Cores
from kvrelay.worker.runtime.draft_loading import load_draft
from kvrelay.worker.runtime.grpc_server import MAX_MESSAGE_BYTES, worker_server
from kvrelay.worker.runtime.model_loading import load_runner
from kvrelay.worker.runtime.registration import publish_heartbeats, sign_off
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.session import WorkerService
from kvrelay.worker.stage import BuildStage
from kvrelay.worker.tiers.tier_store import TierStore
from kvrelay.worker.worker import Worker

log = get_logger("worker")

BuildWorker = Callable[[Identity, Credentials | None], Worker]


async def serve(
    settings: WorkerSettings,
    build_stage: BuildStage,
    stop: StopRequest,
    model: LoadedModel | None = None,
    runner: ModelRunner | None = None,
) -> int:
    """Loads the model, unless the model or its runner is given, then serves until `stop` is set.
    Returns the worker's epoch.

    Raises ModelRefused and ConfigError, and what `host_worker` raises.
    """
    runner = runner or await load_runner(settings, model)
    draft = await load_draft(settings, runner)
    build = worker_builder(settings, build_stage, runner, MonotonicClock(), draft=draft)
    largest = max(MAX_MESSAGE_BYTES, message_bytes(runner.layout))
    return await host_worker(settings, host_id(), build, stop, max_message_bytes=largest)


def worker_builder(
    settings: WorkerSettings,
    build_stage: BuildStage,
    runner: ModelRunner,
    clock: Clock,
    *,
    hash_bytes: int = HASH_BYTES,
    draft: ModelRunner | None = None,
) -> BuildWorker:
    """Returns the function that builds the worker. A small `hash_bytes` makes hash collisions, for
    tests.
    """
    config = settings.config
    kv = config.pool_kv(settings.pool)

    def build(identity: Identity, credentials: Credentials | None) -> Worker:
        windows = runner.windows
        cache = KvCache(
            runner.num_blocks,
            kv.block_size,
            prefix_cache=kv.prefix_cache,
            model=runner.layout_hash,
            hash_bytes=hash_bytes,
            windows=windows,
            capacity=BlockUnits.in_memory(runner.layout, runner.kv_bytes) if windows else None,
            memory=runner.kv.vacated if windows else None,
        )
        sender = Sender(
            runner.kv,
            worker_id=identity.worker_id,
            host_id=identity.host_id,
            model_id=runner.model_id,
            sampled_model_id=runner.sampled_model_id,
            layout_hash=runner.layout_hash,
            clock=clock,
            digests=kv.digest,
            host=config.listen.worker_host,
            credentials=credentials,
        )
        tiers = None
        if kv.tiers:
            tiers = TierStore.build(
                kv.tiers, cache, runner.kv, runner.stored_layout, clock, sender.channels
            )
        context = WorkerContext(identity, config, runner, cache, sender, clock, tiers, draft=draft)
        return Worker(context, build_stage)

    return build


async def host_worker(
    settings: WorkerSettings,
    host_id: str,
    build: BuildWorker,
    stop: StopRequest,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> int:
    """Serves until `stop` is set: drains for at most DRAIN_GRACE_S, and ends at once at the second
    request. Returns the worker's epoch.

    Raises ConfigError for invalid certificates, Unavailable if the registry cannot be reached at
    the start, FailedPrecondition if another controller has led since the worker was started,
    StepHung if the engine hangs, and RankLost if a rank is lost. After StepHung and RankLost the
    engine thread and the KV memory stay as they are, and the process has to end.
    """
    credentials = Credentials.internal(settings.config.security, "worker")
    transfer = settings.config.transfer
    if credentials is not None and transfer.bypasses_tls:
        log.warning("kv_transfer_not_encrypted", transport=transfer.transport)
    guard = None if credentials is None else RoleGuard()
    cores = Cores(settings.config.pool(settings.pool).threads if settings.pin else 0)
    host = settings.config.listen.worker_host
    worker: Worker | None = None
    try:
        async with (
            await Registry.connect(
                settings.redis_url, namespace=settings.config.redis.namespace
            ) as registry,
            worker_server(host, max_message_bytes, credentials, guard) as (server, address),
        ):
            epoch = await registry.next_epoch(settings.last_epoch, settings.claim)
            identity = Identity(
                settings.worker_id, settings.pool, epoch, address, host_id, settings.claim
            )
            worker = build(identity, credentials)
            await worker.context.engine.call(cores.pin)
            service = _add_services(worker, server)
            await server.start()
            try:
                await _until_one_ends(
                    worker.run(),
                    worker.context.engine.hang(),
                    cores.watch(),
                    _registered(
                        AdapterLoading(worker, registry, settings.config.adapters),
                        lambda: publish_heartbeats(worker, registry, credentials, guard),
                    ),
                    _stopped(worker, stop),
                )
            except Exception as error:
                service.close(Unavailable(f"{settings.worker_id} cannot continue: {error}"))
                raise
            finally:
                service.close()
                await sign_off(worker, registry)
    finally:
        if worker is not None and worker.context.engine.hung:
            worker.context.runner.kill_ranks()
        elif worker is not None:
            # Only after the server has ended does no call read or write the KV.
            await worker.close()
        cores.release()
    return epoch


def _add_services(worker: Worker, server: grpc.aio.Server) -> WorkerService:
    service = WorkerService(worker)
    add_WorkerServiceServicer_to_server(service, server)
    add_kv_transfer_servicer(worker.stage.inbound.receiver.Push, worker.prefix_export.Fetch, server)
    return service


async def _until_one_ends(*parts: Coroutine[None, None, None]) -> None:
    """Runs all parts until the first ends, then cancels the others. Raises the exception of the
    ended part.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _registered(
    adapters: AdapterLoading, heartbeats: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Registers the worker when it has the listed adapters, and keeps both up to date."""
    await adapters.catch_up()
    await _until_one_ends(heartbeats(), adapters.run())


async def _stopped(worker: Worker, stop: StopRequest) -> None:
    """Returns when the worker may end: it has drained, or `stop.halt` is set."""
    await stop.drain.wait()
    if not stop.halt.is_set():
        log.info("draining", worker=worker.context.identity.worker_id, grace_s=DRAIN_GRACE_S)
        worker.drain(DRAIN_GRACE_S)
        halted = asyncio.create_task(stop.halt.wait())
        emptied = asyncio.create_task(worker.emptied())
        await asyncio.wait({halted, emptied}, return_when=asyncio.FIRST_COMPLETED)
        flushed = asyncio.create_task(worker.flush())
        await asyncio.wait({halted, flushed}, return_when=asyncio.FIRST_COMPLETED)
        for task in (halted, emptied, flushed):
            task.cancel()
