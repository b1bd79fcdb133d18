"""Loads a worker's model onto the device of its pool."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from kvrelay.config.adapters import AdaptersConfig
from kvrelay.engine.base.device import find_device
from kvrelay.engine.model.loader import LoadedModel, load_model
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.engine.runner import ModelRunner
from kvrelay.models.adapters.adapter_files import read_adapter
from kvrelay.process.telemetry import get_logger
from kvrelay.types.token_eviction import EvictionMethod
from kvrelay.worker.runtime.auto_memory import AutoMemory
from kvrelay.worker.runtime.heap import keep_freed_memory
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.steps.step_watch import POLL_S

# Seconds in which a decode worker prepares its steps before it serves.
_CAPTURE_S = 1.0
_NO_WHOLE_PAGES = (
    "a block takes no whole pages of memory in these layers (a larger kv.block_size may help)"
)

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
        return load_model(
            settings.model_path,
            dtype=settings.config.model.dtype,
            device=device,
            latents=settings.config.keeps_latents,
        )

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
    group = None
    if model is None and (degree := settings.config.pool(settings.pool).tensor_parallel) > 1:
        # Started by this thread, which lasts as long as the worker: the ranks end with the thread
        # that starts them.
        group = RankGroup(degree, _device(settings))
    loading = asyncio.create_task(asyncio.to_thread(_make_runner, settings, model, group))
    runner = await _unless_lost(loading, group)
    if runner.kernels == "flashinfer":
        log.warning("gpu_engine_is_experimental", worker=settings.worker_id, instead="engine: vllm")
    if runner.without_kernels:
        log.warning(
            "native_kernels_unavailable", worker=settings.worker_id, reason=runner.without_kernels
        )
    if runner.windowed and runner.windows is None:
        log.info(
            "kv_of_windows_kept",
            worker=settings.worker_id,
            reason=settings.config.whole_windows or _NO_WHOLE_PAGES,
        )
    if runner.not_captured:
        log.info(
            "forward_not_captured",
            worker=settings.worker_id,
            reason=runner.not_captured,
        )
    return runner


def _make_runner(
    settings: WorkerSettings, model: LoadedModel | None, group: RankGroup | None
) -> ModelRunner:
    runner = _load(settings, model, group)
    load_adapters(runner, settings.config.adapters)
    slots = 1
    if settings.pool == "decode":
        slots = settings.config.decode.max_batch
        runner.capture_decode_steps(slots, _CAPTURE_S)
    runner.try_largest_step(settings.config.pool(settings.pool).chunk_tokens, slots)
    if runner.windows is not None:
        # Trial steps have written to blocks, which are free now.
        runner.kv.vacated.give_up(range(runner.num_blocks))
        runner.kv.vacated.settle()
    return runner


def _load(
    settings: WorkerSettings, model: LoadedModel | None, group: RankGroup | None
) -> ModelRunner:
    config, pool = settings.config, settings.config.pool(settings.pool)
    kv = config.pool_kv(settings.pool)
    options: dict[str, Any] = {
        "block_size": kv.block_size,
        "kv_dtype": kv.dtype,
        "kv_bytes": AutoMemory(settings) if kv.memory == "auto" else kv.memory,
        "max_model_len": config.model.max_model_len,
        "weights": pool.weights,
        "adapter_slots": config.adapters.max_loaded,
        "eviction": _eviction(settings),
        "step_tokens": None if config.whole_windows else config.step_tokens(settings.pool),
    }
    if model is not None:
        # OpenMP keeps this number per calling thread.
        torch.set_num_threads(pool.threads)
        return ModelRunner.of(model, **options)
    return ModelRunner.load(
        settings.model_path,
        dtype=config.model.dtype,
        device=_device(settings),
        threads=pool.threads,
        group=group,
        latents=config.keeps_latents,
        **options,
    )


def _eviction(settings: WorkerSettings) -> EvictionMethod | None:
    """How the pool's workers drop tokens; None if they keep all."""
    eviction = settings.config.kv.eviction
    return eviction.method if eviction is not None and settings.pool == "decode" else None


def load_adapters(runner: ModelRunner, config: AdaptersConfig) -> None:
    """Loads all configured adapters before the first step of a request. Raises ModelRefused for the
    first that cannot be served, since a worker without it would not be like the others.
    """
    if config.serve:
        runner.adapters.find_sites()
    for one in config.serve:
        adapter = runner.adapters.prepare(read_adapter(one.path, config.max_rank), one.name)
        runner.adapters.install(adapter)
        log.info("adapter_loaded", adapter=one.name, id=adapter.adapter_id, bytes=adapter.nbytes)


async def _unless_lost(loading: asyncio.Task[ModelRunner], group: RankGroup | None) -> ModelRunner:
    """Waits for the runner. If loading fails or a rank is lost, kills all ranks, which would
    otherwise wait for each other.
    """
    try:
        while group is not None and not loading.done():
            await asyncio.wait({loading}, timeout=POLL_S)
            if reason := group.lost():
                raise RankLost(reason)
        return await loading
    except BaseException:
        if group is not None:
            group.kill()
        raise


def _device(settings: WorkerSettings) -> str:
    return "cuda" if settings.config.pool(settings.pool).resources.num_gpus else "cpu"
