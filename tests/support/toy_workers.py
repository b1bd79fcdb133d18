"""Real workers around the toy engine of the simulation, where one wrong KV byte changes the answer,
with real files and threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from simulation.toy_engine import BLOCK, ToyRunner
from support.worker_harness import SERVE, Workers, new_registry

from kvrelay.config.schema import ClusterConfig
from kvrelay.process.stop_request import StopRequest
from kvrelay.types.workers import PoolName
from kvrelay.worker.runtime.settings import WorkerSettings


def toy_config(tiers: list[dict[str, Any]], max_batch: int = 8) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "kv": {"block_size": BLOCK, "tiers": tiers},
            "prefill": {"chunk_tokens": 16},
            "decode": {"chunk_tokens": 16, "max_batch": max_batch},
        }
    )


@asynccontextmanager
async def toy_workers(
    config: ClusterConfig, num_blocks: int, *names: str, drains: bool = False
) -> AsyncIterator[Workers]:
    """Runs workers named like `prefill-0`. `drains`: they end in order."""
    stop = StopRequest()
    async with new_registry() as (url, registry), asyncio.TaskGroup() as tasks:
        for nonce, name in enumerate(names):
            pool: PoolName = "prefill" if name.startswith("prefill") else "decode"
            runner: Any = ToyRunner(num_blocks, nonce, lambda: None)
            settings = WorkerSettings(name, pool, "", url, config)
            tasks.create_task(SERVE[pool](settings, stop, runner=runner))
        async with asyncio.timeout(60):
            while [info.state for info in await registry.workers()] != ["ready"] * len(names):
                await asyncio.sleep(0.02)
        running = Workers(registry, None)
        try:
            yield running
        finally:
            await running.close()
            if drains:
                stop.drain.set()
            else:
                stop.now()
