"""Runs one worker, with its gRPC server, step loop and heartbeat, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import torch
from transformers.utils.logging import disable_progress_bar

from kvrelay.engine.base.device import find_device
from kvrelay.engine.model.loader import LoadedModel, load_model
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.parallel.lost import RankLost
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.process.stop_request import DRAIN_GRACE_S, StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import listen
from kvrelay.security.guard import RoleGuard
from kvrelay.state.registry import Registry
from kvrelay.wire.worker import add_WorkerServiceServicer_to_server
from kvrelay.worker.base import Identity, Worker
from kvrelay.worker.cores import Cores
from kvrelay.worker.heap import keep_freed_memory
from kvrelay.worker.session import WorkerService
from kvrelay.worker.settings import WorkerSettings
from kvrelay.worker.step_watch import LOOK_S

HEARTBEAT_S = 0.5
TTL_S = 3.0
# Seconds for the last events to reach the routers.
STOP_GRACE_S = 1.0
# Connections of routers and workers, one each.
MAX_CONNECTIONS = 1024
# Milliseconds for TLS and for the first HTTP/2 settings.
HANDSHAKE_MS = 10_000
# Holds a prompt of a million token ids and more.
MAX_MESSAGE_BYTES = 16 * 2**20

log = get_logger("worker")


async def load_weights(settings: WorkerSettings) -> LoadedModel | None:
    """Loads the model onto the pool's device, off the event loop, for a process that serves in one
    pool after another.

    Returns None if ranks share the model: they load it with each runner. Raises ModelRefused, and
    ConfigError if there is no such device.
    """
    pool, device = settings.config.pool(settings.pool), _device(settings)
    if pool.tensor_parallel > 1:
        return None

    def load() -> LoadedModel:
        find_device(device)
        torch.set_num_threads(pool.threads)
        return load_model(settings.model_path, dtype=settings.config.model.dtype, device=device)

    # A worker's log is read line by line.
    disable_progress_bar()
    began = time.monotonic()
    loaded = await asyncio.to_thread(load)
    log.info(
        "weights_loaded",
        worker=settings.worker_id,
        seconds=time.monotonic() - began,
        pid=os.getpid(),
    )
    return loaded


async def load_runner(settings: WorkerSettings, model: LoadedModel | None = None) -> ModelRunner:
    """The runner with the pool's KV memory. Loads the model off the event loop unless it is given.

    Raises ModelRefused, ConfigError, RankLost.
    """
    keep_freed_memory()
    disable_progress_bar()
    config, pool = settings.config, settings.config.pool(settings.pool)
    kv = config.pool_kv(settings.pool)
    loading: Callable[..., ModelRunner]
    if model is not None:
        group, loading = None, partial(_runner_of, model, pool.threads)
    else:
        device = _device(settings)
        # Started by this thread, which lasts as long as the worker: the ranks end with the thread
        # that starts them.
        group = None if pool.tensor_parallel == 1 else RankGroup(pool.tensor_parallel, device)
        loading = partial(
            ModelRunner.load,
            settings.model_path,
            dtype=config.model.dtype,
            device=device,
            threads=pool.threads,
            group=group,
        )
    load = partial(
        loading,
        block_size=kv.block_size,
        kv_dtype=kv.dtype,
        kv_bytes=kv.memory,
        max_model_len=config.model.max_model_len,
        weights=pool.weights,
    )
    runner = await _unless_lost(asyncio.create_task(asyncio.to_thread(load)), group)
    if runner.without_kernels:
        log.warning(
            "native_kernels_unavailable", worker=settings.worker_id, reason=runner.without_kernels
        )
    if runner.not_captured:
        log.info(
            "forward_not_captured",
            worker=settings.worker_id,
            reason=runner.not_captured,
        )
    return runner


async def _unless_lost(loading: asyncio.Task[ModelRunner], group: RankGroup | None) -> ModelRunner:
    """Waits for the runner. If loading fails or a rank is lost, kills all ranks, which would
    otherwise wait for each other.
    """
    try:
        while group is not None and not loading.done():
            await asyncio.wait({loading}, timeout=LOOK_S)
            if why := group.lost():
                raise RankLost(why)
        return await loading
    except BaseException:
        if group is not None:
            group.kill()
        raise


def _runner_of(model: LoadedModel, threads: int, **options: Any) -> ModelRunner:
    # OpenMP keeps this number per calling thread.
    torch.set_num_threads(threads)
    return ModelRunner.of(model, **options)


def _device(settings: WorkerSettings) -> str:
    return "cuda" if settings.config.pool(settings.pool).resources.num_gpus else "cpu"


BuildWorker = Callable[[grpc.aio.Server, Identity, Credentials | None], Worker]
"""From a server, to add services of the worker's own to, who it is, and what it shows other
workers.
"""


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
        log.warning(
            "kv_transfer_not_encrypted",
            transport=transfer.transport,
        )
    guard = None if credentials is None else RoleGuard()
    cores = Cores(settings.config.pool(settings.pool).threads if settings.pin else 0)
    host = settings.config.listen.worker_host
    worker: Worker | None = None
    try:
        async with (
            await Registry.connect(settings.redis_url) as registry,
            _server(host, max_message_bytes, credentials, guard) as (server, address),
        ):
            epoch = await registry.next_epoch(settings.last_epoch, settings.claim)
            identity = Identity(
                settings.worker_id, settings.pool, epoch, address, host_id, settings.claim
            )
            worker = build(server, identity, credentials)
            await worker.steps.in_engine_thread(cores.pin)
            service = WorkerService(worker)
            add_WorkerServiceServicer_to_server(service, server)
            await server.start()
            try:
                await _until_one_ends(
                    worker.run(),
                    worker.steps.hang(),
                    _heartbeat(worker, registry, credentials, guard),
                    _stopped(worker, stop),
                )
            except Exception as error:
                service.close(Unavailable(f"{settings.worker_id} cannot continue: {error}"))
                raise
            finally:
                service.close()
                await _leave(worker, registry)
    finally:
        if worker is not None and worker.steps.hung:
            worker.runner.kill_ranks()
        elif worker is not None:
            # Only after the server has ended does no call read or write the KV.
            await worker.close()
        cores.release()
    return epoch


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


async def _stopped(worker: Worker, stop: StopRequest) -> None:
    """Returns when the worker may end: it has drained, or `stop.halt` is set."""
    await stop.drain.wait()
    if not stop.halt.is_set():
        log.info("draining", worker=worker.identity.worker_id, grace_s=DRAIN_GRACE_S)
        worker.drain(DRAIN_GRACE_S)
        halted = asyncio.create_task(stop.halt.wait())
        emptied = asyncio.create_task(worker.emptied())
        await asyncio.wait({halted, emptied}, return_when=asyncio.FIRST_COMPLETED)
        for task in (halted, emptied):
            task.cancel()


@asynccontextmanager
async def _server(
    host: str, max_message_bytes: int, credentials: Credentials | None, guard: RoleGuard | None
) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """A server on a free port of `host`, not yet started."""
    server = grpc.aio.server(
        interceptors=() if guard is None else (guard,),
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            # Detects a frozen or unreachable router, and frees what it held here.
            ("grpc.keepalive_time_ms", 5000),
            ("grpc.keepalive_timeout_ms", 5000),
            # Timeout of the pings that measure bandwidth; the default is a minute.
            ("grpc.http2.ping_timeout_ms", 5000),
            # Peers ping often to detect a frozen process. The server must not treat that as abuse.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.keepalive_permit_without_calls", 1),
            # Limits idle connections in number and time, so that they cannot exhaust memory.
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ],
    )
    port = listen(server, f"{host}:0", credentials)
    try:
        yield server, f"{host}:{port}"
    finally:
        await server.stop(STOP_GRACE_S)


async def _heartbeat(
    worker: Worker, registry: Registry, credentials: Credentials | None, guard: RoleGuard | None
) -> None:
    """Publishes the worker's state, at once when it changes. An unreachable registry costs
    visibility, not streams.
    """
    away, told = False, ""
    while True:
        worker.steps.news.clear()
        if credentials is not None and guard is not None:
            worker.certificate_note = credentials.trouble()
            guard.tell_of_ended()
        try:
            info = worker.info()
            await registry.publish_worker(info, TTL_S)
            if info.state != told:
                await registry.announce_change()
                told = info.state
            if away:
                log.info("registry_available", worker=worker.identity.worker_id)
            away = False
        except Unavailable as error:
            if not away:
                log.warning(
                    "registry_unavailable", worker=worker.identity.worker_id, reason=error.message
                )
            away = True
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await worker.steps.news.wait()


async def _leave(worker: Worker, registry: Registry) -> None:
    """Removes the worker's entry from the registry. The entry of a hung worker stays until its TTL,
    with the state stuck.
    """
    try:
        if worker.steps.hung:
            await registry.publish_worker(worker.info(), TTL_S)
        else:
            await registry.remove_worker(worker.identity.worker_id, worker.identity.epoch)
    except KvRelayError as error:
        log.warning(
            "registry_sign_off_failed",
            worker=worker.identity.worker_id,
            reason=error.message,
        )
