"""Runs one worker on vLLM until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from kv_transfer.channels import message_bytes
from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kvrelay.clock import MonotonicClock
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.process.stop_request import StopRequest
from kvrelay.security.credentials import Credentials
from kvrelay.vllm_engine.arguments import hands_over, staging_bytes
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.engine_config import not_handed_over
from kvrelay.vllm_engine.model import VllmModel
from kvrelay.vllm_engine.nixl.side_channel import side_channel
from kvrelay.vllm_engine.thread import VllmThread
from kvrelay.vllm_engine.version_check import check_version
from kvrelay.worker.context import Identity, WorkerContext
from kvrelay.worker.runtime.grpc_server import MAX_MESSAGE_BYTES
from kvrelay.worker.runtime.host import host_worker
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.stage import Stage
from kvrelay.worker.worker import Worker

BuildStage = Callable[[WorkerContext, VllmEngine, VllmModel], Stage]


async def serve(settings: WorkerSettings, build_stage: BuildStage, stop: StopRequest) -> int:
    """Starts vLLM, then serves until `stop` is set. Returns the worker's epoch.

    Raises ConfigError, ModelRefused, and what `host_worker` raises.
    """
    check_version()
    config, pool = settings.config, settings.pool
    checkpoint = find_checkpoint(settings.model_path)
    clock = MonotonicClock()
    thread = VllmThread(clock)
    in_vllm, kv = config.transfer.in_vllm, config.pool_kv(pool)
    with side_channel(config.listen.worker_host) if in_vllm else nullcontext():
        engine = await thread.load(config, pool, str(checkpoint.folder))
    model = await asyncio.to_thread(
        VllmModel, engine, checkpoint, kv.block_size, staging_bytes(config, pool)
    )
    if model.without_handoff and hands_over(config, pool):
        raise not_handed_over(settings.model_path, model.without_handoff)

    await thread.warm_up()

    def build(identity: Identity, credentials: Credentials | None) -> Worker:
        # vLLM has the prefix cache. Without staging memory, these are promises of vLLM's blocks.
        num_blocks = engine.blocks.total if in_vllm else model.kv.num_blocks
        cache = KvCache(num_blocks, kv.block_size, prefix_cache=False, model=model.layout_hash)
        sender = Sender(
            model.kv,
            worker_id=identity.worker_id,
            host_id=identity.host_id,
            model_id=model.model_id,
            sampled_model_id=model.sampled_model_id,
            layout_hash=model.layout_hash,
            clock=clock,
            digests=kv.digest,
            host=config.listen.worker_host,
            credentials=credentials,
            in_vllm=in_vllm,
        )
        context = WorkerContext(identity, config, model, cache, sender, clock, engine=thread)
        return Worker(context, lambda context: build_stage(context, engine, model))

    largest = max(MAX_MESSAGE_BYTES, message_bytes(model.layout))
    return await host_worker(settings, host_id(), build, stop, max_message_bytes=largest)
