"""A real router process with mock workers, for benchmarks of the router alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.bench.environment import model_folder
from kvrelay.bench.router.mock_workers import AtOnceWorker, keep_pace
from kvrelay.bench.router.router_process import RouterProcess, starting_router
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry

_HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class MockPools:
    """The number and the speed of the mock workers.

    Each worker has a batch of `slots` sequences and takes a step every `step_s` seconds. A step
    gives each sequence of a decode worker one more `token`, which is always the same.
    """

    prefill: int
    decode: int
    slots: int
    step_s: float
    token: int

    def paces(self, steps: Sequence[Callable[[], None]]) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that take the steps of all workers, evenly apart, until cancelled."""
        return [
            keep_pace(step, self.step_s, self.step_s * turn / self.decode)
            for turn, step in enumerate(steps)
        ]


@asynccontextmanager
async def mock_cluster(
    pools: MockPools,
    core: int,
    *,
    said: defaultdict[str, list[float]] | None = None,
    tokens_file: Path | None = None,
    processes: int = 1,
) -> AsyncIterator[RouterProcess]:
    """Starts a router on `core` and its workers in this process. Yields the router once it is
    ready.

    `said` receives, by request id, the time.perf_counter times at which a worker emitted each
    token. Raises Unavailable if the router does not become ready.
    """
    said = defaultdict(list) if said is None else said
    async with (
        EmbeddedRedis() as redis,
        # The router starts before this process has gRPC threads, because gRPC would notice the
        # fork.
        starting_router(
            redis.url,
            model_folder("demo"),
            pools.prefill,
            pools.decode,
            pools.slots,
            core,
            tokens_file,
            processes,
        ) as router,
        AsyncExitStack() as ends,
    ):
        registry = await ends.enter_async_context(await Registry.connect(redis.url))
        workers = _workers(pools, said)
        for worker in workers:
            await worker.start()
            ends.push_async_callback(worker.stop)
        paces = pools.paces([worker.step for worker in workers])
        tasks = [asyncio.create_task(one) for one in (*paces, _beat(registry, workers))]
        try:
            await router.ready()
            yield router
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _workers(pools: MockPools, said: defaultdict[str, list[float]]) -> list[AtOnceWorker]:
    peers: dict[str, AtOnceWorker] = {}
    for number in range(pools.prefill):
        AtOnceWorker(f"prefill-{number}", "prefill", pools.token, said, peers)
    for number in range(pools.decode):
        AtOnceWorker(f"decode-{number}", "decode", pools.token, said, peers)
    return list(peers.values())


async def _beat(registry: Registry, workers: list[AtOnceWorker]) -> None:
    while True:
        for worker in workers:
            await registry.publish_worker(worker.info)
        await asyncio.sleep(_HEARTBEAT_S)
