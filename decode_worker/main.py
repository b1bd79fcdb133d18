"""Starts a decode worker from its settings."""

from __future__ import annotations

import asyncio

import grpc

from decode_worker.worker import DecodeWorker
from kv_transfer.channels import message_bytes
from kv_transfer.choice import host_id
from kvrelay.clock import MonotonicClock
from kvrelay.engine.cache import KvCache
from kvrelay.wire.transfer import add_KvTransferServiceServicer_to_server
from kvrelay.worker.base import Identity
from kvrelay.worker.host import MAX_MESSAGE_BYTES, host_worker, load_runner
from kvrelay.worker.settings import WorkerSettings


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Loads the model, then serves until `stop` is set. Raises ModelRefused, ConfigError, Unavailable."""
    config = settings.config
    runner = await load_runner(settings)
    clock = MonotonicClock()

    def build(server: grpc.aio.Server, identity: Identity) -> DecodeWorker:
        worker = DecodeWorker(
            identity,
            runner,
            KvCache(runner.num_blocks, config.kv.block_size, prefix_cache=config.kv.prefix_cache),
            max_batch=config.decode.max_batch,
            chunk_tokens=config.decode.chunk_tokens,
            speculation=config.decode.speculation,
            digests=config.kv.digest,
            host=config.listen.worker_host,
            clock=clock,
        )
        add_KvTransferServiceServicer_to_server(worker.receiver, server)
        return worker

    largest = max(MAX_MESSAGE_BYTES, message_bytes(runner.layout))
    await host_worker(settings, host_id(), build, stop, max_message_bytes=largest)
