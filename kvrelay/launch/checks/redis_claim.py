"""What a cluster does with its Redis before it starts its components."""

from __future__ import annotations

import asyncio
import time

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, Unavailable
from kvrelay.state.registry import Registry
from kvrelay.types.workers import PendingWorker

# Lifetime of the registry entries of killed workers: their time to live in Redis, plus one second.
_ENTRIES_END_S = 4.0
_POLL_S = 0.2
# Most workers that an error lists.
_SHOWN = 3


async def claim_redis(config: ClusterConfig) -> None:
    """Overwrites the desired pool sizes of one model that an earlier cluster left on this Redis.

    Raises Unavailable if Redis does not answer, and ConfigError if the earlier cluster still runs.
    """
    async with await connected(config) as registry:
        await _check_alone(registry)
        await registry.set_desired(
            {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        )


async def check_redis(config: ClusterConfig) -> None:
    """Raises Unavailable if the Redis of the configuration does not answer."""
    if config.redis.url != "embedded":
        await (await connected(config)).close()


async def connected(config: ClusterConfig) -> Registry:
    """Connects to the registry of one model. Raises Unavailable, with what to do."""
    try:
        return await Registry.connect(config.redis.url, namespace=config.redis.namespace)
    except Unavailable as error:
        reason = error.message.rstrip(". ")
        raise Unavailable(
            f"redis.url: {reason}; start a Redis there, or set redis.url: embedded"
        ) from None


async def _check_alone(registry: Registry) -> None:
    """Raises ConfigError if another cluster runs on this Redis. The registry entries of killed
    workers expire; the entries of another cluster are renewed.
    """
    gives_up_at = time.monotonic() + _ENTRIES_END_S
    while found := await _serving_workers(registry):
        if time.monotonic() > gives_up_at:
            raise ConfigError(
                f"redis.url: another cluster runs on this Redis ({found}); stop that cluster, or "
                "give this one another redis.namespace, or a separate database, for example "
                "redis://HOST:PORT/1"
            )
        await asyncio.sleep(_POLL_S)


async def _serving_workers(registry: Registry) -> str:
    """Returns some of the workers that do not drain; empty if there are none."""
    infos = [info for info in await registry.workers() if info.state != "draining"]
    return ", ".join(f"{info.worker_id} at {info.address}" for info in infos[:_SHOWN])


async def pending_workers(config: ClusterConfig) -> str:
    """Returns the workers that wait for room, with the reasons; empty if there are none."""
    waiting: list[PendingWorker] = []
    for one in config.served:
        async with await connected(one) as registry:
            waiting += await registry.pending()
    return "".join(f"; {one.worker_id} waits for room: {one.reason}" for one in waiting)
