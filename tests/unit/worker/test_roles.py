"""One process that serves in one pool and then in the other."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.worker_harness import Session, new_registry

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.runner import ModelRunner
from kvrelay.launch.pool_switch import Roles
from kvrelay.state.registry import Registry
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import PoolName, WorkerInfo
from kvrelay.worker.runtime import model_loading, registration
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker_messages import RunLocal

PROMPT = tuple(range(2, 63))
SPEC = SequenceSpec(
    "r",
    0,
    PROMPT,
    len(PROMPT),
    SamplingParams(temperature=0.0, max_tokens=8, seed=1, ignore_eos=True),
)


def config(**unlike: object) -> ClusterConfig:
    """`unlike` is the prefill pool's own `kv`."""
    return ClusterConfig.model_validate(
        {"model": {"dtype": "float32"}, "kv": {"memory": "4MiB"}, "prefill": {"kv": unlike}}
    )


async def ready(registry: Registry, pool: PoolName) -> WorkerInfo:
    async with asyncio.timeout(60):
        while True:
            infos = await registry.workers()
            if [(one.pool, one.state) for one in infos] == [(pool, "ready")]:
                return infos[0]
            await asyncio.sleep(0.05)


async def answer(info: WorkerInfo) -> list[int]:
    session = await Session(info).open()
    await session.send(RunLocal(SPEC))
    try:
        return await session.answer()
    finally:
        await session.close()


def arenas() -> int:
    """Memory files for KV that this process has."""
    maps = Path("/proc/self/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if "/memfd:kvrelay-" in line})


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "unlike",
    [{}, {"memory": "2MiB"}, {"block_size": 16}, {"dtype": "int8"}],
    ids=lambda unlike: str(unlike),
)
async def test_a_worker_changes_over_with_its_weights(
    tiny_model: Callable[..., Path], unlike: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load_model = model_loading.load_model

    def counted(path: str, **options: Any) -> LoadedModel:
        loads.append(path)
        return load_model(path, **options)

    monkeypatch.setattr(model_loading, "load_model", counted)
    model = str(tiny_model("llama"))
    async with new_registry() as (url, registry):
        fresh, decode = (
            Roles(),
            WorkerSettings("decode-0", "decode", model, url, config(**unlike)),
        )
        running = asyncio.create_task(fresh.serve(decode))
        expected = await answer(await ready(registry, "decode"))
        fresh()
        await running

        loads.clear()
        with warnings.catch_warnings():
            # What earlier tests have left in cycles, open connections too, is none of this one's.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        before = arenas()
        roles, prefill = (
            Roles(),
            WorkerSettings("prefill-0", "prefill", model, url, config(**unlike)),
        )
        running = asyncio.create_task(roles.serve(prefill))
        first = await ready(registry, "prefill")
        await registry._call("FLUSHALL")
        roles.turn("decode")
        second = await ready(registry, "decode")
        assert (second.worker_id, second.pid) == ("prefill-0", first.pid)
        assert second.epoch > first.epoch
        assert second.address != first.address
        assert await answer(second) == expected
        roles.turn("prefill")
        assert (await ready(registry, "prefill")).layout_hash == first.layout_hash
        assert loads == [model], "once, for three roles"
        assert arenas() == before + 1, "the memory of the other two is given back"
        roles()
        await running


async def test_one_that_was_told_to_end_does_not_change_over(
    tiny_model: Callable[..., Path],
) -> None:
    async with new_registry() as (url, registry):
        for turns_first in (True, False):
            settings = WorkerSettings(
                "prefill-0", "prefill", str(tiny_model("llama")), url, config()
            )
            roles = Roles()
            running = asyncio.create_task(roles.serve(settings))
            await ready(registry, "prefill")
            if turns_first:
                roles.turn("decode")
            roles()
            roles.turn("decode")
            async with asyncio.timeout(30):
                await running
            assert await registry.workers() == ()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("unlike", [{}, {"block_size": 16}], ids=str)
async def test_a_worker_stands_by_and_joins_either_pool(
    tiny_model: Callable[..., Path],
    unlike: dict[str, object],
    pool: PoolName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    of = ModelRunner.of

    def counted(*arguments: Any, **options: Any) -> ModelRunner:
        made.append(options["block_size"])
        return of(*arguments, **options)

    monkeypatch.setattr(ModelRunner, "of", counted)
    model = str(tiny_model("llama"))
    async with new_registry() as (url, registry):
        plain = Roles()
        running = asyncio.create_task(
            plain.serve(WorkerSettings("decode-0", "decode", model, url, config(**unlike)))
        )
        expected = await answer(await ready(registry, "decode"))
        plain()
        await running
        made.clear()

        roles = Roles()
        settings = WorkerSettings("standby-0", "decode", model, url, config(**unlike), standby=True)
        running = asyncio.create_task(roles.serve(settings))
        async with asyncio.timeout(60):
            while [one.state for one in await registry.standbys()] != ["ready"]:
                await asyncio.sleep(0.05)
        assert await registry.workers() == (), "it is of no pool"
        assert arenas() == 1
        roles.turn(pool)
        info = await ready(registry, pool)
        if pool == "decode":
            assert await answer(info) == expected
        assert made == ([32] if pool == "decode" or not unlike else [32, 16]), (
            "KV memory is made anew only if it must be"
        )
        assert arenas() == 1
        roles()
        await running


async def test_a_standby_worker_that_is_told_to_end_ends(tiny_model: Callable[..., Path]) -> None:
    async with new_registry() as (url, registry):
        roles = Roles()
        settings = WorkerSettings(
            "standby-0", "decode", str(tiny_model("llama")), url, config(), standby=True
        )
        running = asyncio.create_task(roles.serve(settings))
        async with asyncio.timeout(60):
            while not await registry.standbys():
                await asyncio.sleep(0.05)
        roles()
        await running
        gc.collect()
        assert arenas() == 0


async def test_readiness_is_told_at_once_and_not_with_the_next_heartbeat(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(registration, "TTL_S", 3600.0)
    async with new_registry() as (url, registry):
        roles = Roles()
        settings = WorkerSettings("decode-0", "decode", str(tiny_model("llama")), url, config())
        running = asyncio.create_task(roles.serve(settings))
        await ready(registry, "decode")
        roles()
        await running
