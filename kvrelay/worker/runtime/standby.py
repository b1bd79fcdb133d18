"""A standby worker: a worker of no pool that has finished its start and waits until it is assigned
a pool.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from typing import Literal

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import Unavailable
from kvrelay.process.stop_request import StopRequest
from kvrelay.process.telemetry import get_logger
from kvrelay.state.registry import Registry
from kvrelay.types.workers import PoolName, StandbyWorker
from kvrelay.worker.runtime.model_loading import load_runner
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.steps.meter import resident_bytes
from kvrelay.worker.steps.warmup import warm_up

# Seconds. Rarer than a serving worker's heartbeat, to cost little.
HEARTBEAT_S = 1.0
TTL_S = 5.0

log = get_logger("worker")


@dataclass(slots=True)
class Prepared:
    """A runner with the decode pool's KV memory, after its warm-up steps. None if the worker was
    told to stop standing by before it had a runner.
    """

    config: ClusterConfig
    runner: ModelRunner | None

    def take(self, pool: PoolName) -> ModelRunner | None:
        """The runner, if its KV memory suits the pool. Otherwise closes it and returns None; the
        caller then makes a runner for the pool.
        """
        if self.config.pool_kv(pool) == self.config.pool_kv("decode"):
            return self.runner
        self.close()
        return None

    def close(self) -> None:
        """Closes the runner, if there is one."""
        if self.runner is not None:
            self.runner.close()


async def stand_by(
    settings: WorkerSettings, model: LoadedModel | None, host_id: str, stop: StopRequest
) -> Prepared:
    """Waits until `stop` is set. The KV memory is mapped, and takes up only what the warm-up steps
    wrote.

    Raises ModelRefused, ConfigError, and Unavailable if the registry cannot be reached at the
    start.
    """
    prepared = Prepared(settings.config, None)
    if stop.drain.is_set():
        return prepared
    async with await Registry.connect(
        settings.redis_url, namespace=settings.config.redis.namespace
    ) as registry:
        telling = asyncio.create_task(_heartbeat(settings, registry, host_id, prepared))
        try:
            prepared.runner = await load_runner(replace(settings, pool="decode"), model)
            await asyncio.gather(
                asyncio.to_thread(warm_up, prepared.runner),
                asyncio.to_thread(prepared.runner.grammars.warm_up),
            )
            telling.cancel()
            telling = asyncio.create_task(_heartbeat(settings, registry, host_id, prepared))
            log.info("standby_ready", worker=settings.worker_id, pid=os.getpid())
            await stop.drain.wait()
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
    return prepared


async def _heartbeat(
    settings: WorkerSettings, registry: Registry, host_id: str, prepared: Prepared
) -> None:
    """Publishes the worker's state until cancelled. An unreachable registry costs visibility
    only.
    """
    away = False
    while True:
        runner = prepared.runner
        state: Literal["starting", "ready"] = (
            "starting" if runner is None or runner.warmup is None else "ready"
        )
        resident, _ = resident_bytes()
        weights = 0 if runner is None else runner.weight_bytes
        entry = StandbyWorker(settings.worker_id, state, host_id, os.getpid(), weights, resident)
        try:
            await registry.publish_standby(entry, TTL_S)
            away = False
        except Unavailable as error:
            if not away:
                log.warning("registry_unavailable", worker=settings.worker_id, reason=error.message)
            away = True
        await asyncio.sleep(HEARTBEAT_S)
