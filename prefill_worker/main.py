"""Starts a prefill worker from its settings."""

from __future__ import annotations

import asyncio

import grpc

from kv_transfer.choice import host_id
from kv_transfer.sender import Sender
from kvrelay.clock import MonotonicClock
from kvrelay.engine.cache import KvCache
from kvrelay.worker.base import Identity
from kvrelay.worker.host import host_worker, load_runner
from kvrelay.worker.settings import WorkerSettings
from prefill_worker.worker import PrefillWorker


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Loads the model, then serves until `stop` is set. Raises ModelRefused, ConfigError, Unavailable."""
    config = settings.config
    runner = await load_runner(settings)
    clock = MonotonicClock()

    def build(server: grpc.aio.Server, identity: Identity) -> PrefillWorker:
        return PrefillWorker(
            identity,
            runner,
            KvCache(runner.num_blocks, config.kv.block_size, prefix_cache=config.kv.prefix_cache),
            Sender(
                runner.kv,
                host_id=identity.host_id,
                layout_hash=runner.layout_hash,
                clock=clock,
                digests=config.kv.digest,
                host=config.listen.worker_host,
            ),
            chunk_tokens=config.prefill.chunk_tokens,
            clock=clock,
        )

    await host_worker(settings, host_id(), build, stop)
