"""When a worker that is refused ends the controller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.errors import ConfigError, Unavailable
from kvrelay.launch.failed_start import RefusedStart
from kvrelay.launch.model_controller import refused_by_all
from kvrelay.types.workers import WorkerInfo

SERVING = WorkerInfo(
    "decode-0", "decode", 1, "ready", "10.0.0.1:1", "demo", "00", 16, 64, "host", 4096
)


class Refusing:
    """Both launcher and registry: workers are refused, one after the other, while `serving`
    serve.
    """

    def __init__(self, *serving: WorkerInfo) -> None:
        self.serving = serving
        self.away = False
        self.refusals: asyncio.Queue[RefusedStart] = asyncio.Queue()

    async def refused(self) -> RefusedStart:
        return await self.refusals.get()

    async def workers(self) -> tuple[WorkerInfo, ...]:
        if self.away:
            raise Unavailable("Redis: away")
        return self.serving


@pytest.mark.parametrize("state", ["starting", "draining"])
async def test_nobody_serves(state: Any) -> None:
    cluster: Any = Refusing(
        WorkerInfo("decode-0", "decode", 1, state, "10.0.0.1:1", "demo", "00", 16, 64, "host", 1)
    )
    cluster.refusals.put_nowait(RefusedStart("decode", ConfigError("no certificate")))
    with pytest.raises(ConfigError, match="no certificate"):
        await asyncio.wait_for(refused_by_all(cluster, cluster), 10)


async def test_others_serve_so_it_is_the_hosts_trouble() -> None:
    cluster: Any = Refusing(SERVING)
    waiting = asyncio.create_task(refused_by_all(cluster, cluster))
    for _ in range(3):
        cluster.refusals.put_nowait(RefusedStart("decode", ConfigError("no certificate")))
    while not cluster.refusals.empty():
        await asyncio.sleep(0)
    assert not waiting.done()
    cluster.serving, cluster.away = (), True
    cluster.refusals.put_nowait(RefusedStart("decode", ConfigError("no certificate")))
    while not cluster.refusals.empty():
        await asyncio.sleep(0)
    assert not waiting.done(), "a Redis that is away ends nobody"
    cluster.away = False
    cluster.refusals.put_nowait(RefusedStart("decode", ConfigError("no certificate")))
    with pytest.raises(ConfigError):
        await asyncio.wait_for(waiting, 10)


async def test_workers_of_the_other_pool_do_not_show_that_the_host_is_the_cause() -> None:
    cluster: Any = Refusing(replace(SERVING, worker_id="prefill-0", pool="prefill"))
    cluster.refusals.put_nowait(RefusedStart("decode", ConfigError("the draft model is damaged")))
    with pytest.raises(ConfigError, match="draft model"):
        await asyncio.wait_for(refused_by_all(cluster, cluster), 10)
    waiting = asyncio.create_task(refused_by_all(cluster, cluster))
    cluster.refusals.put_nowait(RefusedStart("standby", ConfigError("the folder is missing")))
    while not cluster.refusals.empty():
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
