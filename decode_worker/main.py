"""Starts a decode worker from its settings."""

from __future__ import annotations

import grpc

from decode_worker.worker import DecodeWorker
from kv_transfer.channels import message_bytes
from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kvrelay.clock import Clock, MonotonicClock
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.stop_request import StopRequest
from kvrelay.security.credentials import Credentials
from kvrelay.wire.transfer import add_kv_transfer_servicer
from kvrelay.worker.base import Identity
from kvrelay.worker.host import MAX_MESSAGE_BYTES, BuildWorker, host_worker, load_runner
from kvrelay.worker.settings import WorkerSettings


async def serve(
    settings: WorkerSettings,
    stop: StopRequest,
    model: LoadedModel | None = None,
    runner: ModelRunner | None = None,
) -> int:
    """Loads the model, unless the model or its runner is given, then serves until `stop` is set.
    Returns the worker's epoch.

    Raises ModelRefused, ConfigError, Unavailable, FailedPrecondition, StepHung, RankLost.
    """
    runner = runner or await load_runner(settings, model)
    build = builder(settings, runner, MonotonicClock())
    largest = max(MAX_MESSAGE_BYTES, message_bytes(runner.layout))
    return await host_worker(settings, host_id(), build, stop, max_message_bytes=largest)


def builder(
    settings: WorkerSettings, runner: ModelRunner, clock: Clock, *, hash_bytes: int = HASH_BYTES
) -> BuildWorker:
    """The function that builds the worker and adds its KV transfer service to a server. A small
    `hash_bytes` makes hash collisions, for tests.
    """
    config = settings.config
    kv = config.pool_kv(settings.pool)

    def build(
        server: grpc.aio.Server, identity: Identity, credentials: Credentials | None
    ) -> DecodeWorker:
        cache = KvCache(
            runner.num_blocks,
            kv.block_size,
            prefix_cache=kv.prefix_cache,
            model=runner.layout_hash,
            hash_bytes=hash_bytes,
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
        worker = DecodeWorker(
            identity,
            runner,
            cache,
            sender,
            max_batch=config.decode.max_batch,
            chunk_tokens=config.decode.chunk_tokens,
            speculation=config.decode.speculation,
            digests=kv.digest,
            host=config.listen.worker_host,
            clock=clock,
        )
        add_kv_transfer_servicer(worker.receiver.Push, worker.prefix_export.Fetch, server)
        return worker

    return build
