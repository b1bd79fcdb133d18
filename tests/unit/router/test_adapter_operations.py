"""Adapters of several models, of models that sleep, and of several routers at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.router_harness import MemoryRegistry
from unit.router.test_adapter_names import adapter_in, change, id_of, obedient
from unit.router.test_several_models import (
    Routers,
    get,
    in_thread,
    post,
    running,
    tokens_over_grpc,
)
from unit.router.test_sibling_processes import running as answering

from kvrelay.cli.main import run
from kvrelay.config.adapters import AdaptersConfig
from kvrelay.errors import FailedPrecondition, KvRelayError, ModelRefused, NotFound
from kvrelay.models.adapters import adapter_reading
from kvrelay.models.adapters.adapter_files import AdapterFiles, read_adapter
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.adapters import AdapterStatus
from router.frontend.adapter_cards import AdapterCards
from router.frontend.adapter_operations import AdapterOperations
from router.sibling_processes import Place, Siblings


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    async with running(tmp_path) as made:
        yield made


async def load(routers: Routers, model: str, name: str, folder: Path) -> AdapterStatus:
    with routers.admin(model) as client:
        found: AdapterStatus = await in_thread(client.load_adapter, name, str(folder))
        return found


async def listed(routers: Routers) -> tuple[AdapterStatus, ...]:
    with routers.admin() as client:
        found: tuple[AdapterStatus, ...] = await in_thread(client.adapters)
        return found


async def test_an_adapter_has_one_name_and_one_model(routers: Routers, tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "lora")
    small, large = routers.models["small"], routers.models["large"]
    async with obedient(small), obedient(large):
        assert (await load(routers, "small", "sql", folder)).model == "small"
        for taken in ("sql", "small", "idle"):
            with pytest.raises(FailedPrecondition, match="is the name of another model, or of its"):
                await load(routers, "large", taken, folder)
        assert await tokens_over_grpc(routers, "sql") == [20] * 4
        await load(routers, "large", "chat", folder)
        assert await tokens_over_grpc(routers, "chat") == [21] * 4, "the same files, another base"
        assert [(one.name, one.model) for one in await listed(routers)] == [
            ("sql", "small"),
            ("chat", "large"),
        ]
        models = (await get(routers, "/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in models] == [
            ("small", None),
            ("sql", "small"),
            ("large", None),
            ("chat", "large"),
            ("idle", None),
        ]
        with routers.admin() as client:
            # The name tells the model.
            await in_thread(client.unload_adapter, "chat")
            with pytest.raises(NotFound, match="'chat' is not loaded"):
                await in_thread(client.unload_adapter, "chat")
        with routers.admin("large") as client, pytest.raises(NotFound, match="is not loaded"):
            await in_thread(client.unload_adapter, "sql")
        assert [one.name for one in await listed(routers)] == ["sql"]


async def test_a_name_that_two_models_load_at_once_is_of_one(
    routers: Routers, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "lora")
    async with obedient(routers.models["small"]), obedient(routers.models["large"]):
        for number in range(8):
            results = await asyncio.gather(
                *(load(routers, model, f"sql-{number}", folder) for model in ("small", "large")),
                return_exceptions=True,
            )
            errors = [one for one in results if isinstance(one, BaseException)]
            assert errors, "both succeeded"
            assert {type(one) for one in errors} == {FailedPrecondition}
            names = [one.name for one in await listed(routers)]
            assert names.count(f"sql-{number}") == 2 - len(errors)


async def test_a_listed_name_that_is_another_models_is_not_served(
    routers: Routers, tmp_path: Path
) -> None:
    """The configuration has gained a model since the adapter was loaded."""
    folder = adapter_in(tmp_path / "lora")
    small = routers.models["small"]
    entry = AdapterEntry("large", str(folder), id_of(folder), served=True)
    async with obedient(small):
        small.registry.listed["large"] = entry
        small.registry.listed["sql"] = replace(entry, name="sql")
        small.registry.announced.set()
        async with asyncio.timeout(60):
            while (await post_ids(routers, "sql")) != [20] * 4:
                await asyncio.sleep(0.05)
        assert await tokens_over_grpc(routers, "large") == [21] * 4
        ids = [one["id"] for one in (await get(routers, "/v1/models")).json()["data"]]
        assert ids.count("large") == 1


async def post_ids(routers: Routers, model: str) -> Any:
    body = {"prompt": list(range(10, 30)), "max_tokens": 4, "return_token_ids": True}
    found = await post(routers, "/v1/completions", model=model, **body)
    return found.json()["choices"][0]["token_ids"] if found.status_code == 200 else None


async def test_an_adapter_of_a_model_that_sleeps_is_loaded_when_it_wakes(
    routers: Routers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, idle = adapter_in(tmp_path / "lora"), routers.models["idle"]
    words = ["adapters", "load", "sql", str(folder), "--model", "idle"]
    assert await in_thread(run, [*words, "--admin", routers.first.admin]) == 0
    assert "workers=0\nThe model sleeps. Its workers load" in capsys.readouterr().out
    (one,) = await listed(routers)
    assert (one.served, one.workers, one.refused) == (True, 0, "")
    waits = asyncio.create_task(tokens_over_grpc(routers, "sql"))
    base = asyncio.create_task(tokens_over_grpc(routers, "idle"))
    await asyncio.sleep(0.2)
    assert not waits.done()
    # What a real worker does before it registers.
    worker = await idle.add("idle.decode-0", "decode")
    worker.worker.says = (22,) * 4
    change(idle, "idle.decode-0", adapters=(one.adapter_id,))
    assert set(await waits) == set(await base) == {22}
    assert (await listed(routers))[0].workers == 1


async def test_an_adapter_that_the_woken_worker_refuses(routers: Routers, tmp_path: Path) -> None:
    folder, idle = adapter_in(tmp_path / "lora"), routers.models["idle"]
    loaded = await load(routers, "idle", "sql", folder)
    server = await idle.add("idle.decode-0", "decode")
    server.worker.says = (22,) * 4
    change(idle, "idle.decode-0", refused_adapters=(f"{loaded.adapter_id} it has another shape",))
    async with asyncio.timeout(60):
        while (await post(routers, "/v1/completions", model="sql", prompt="a")).status_code != 404:
            await asyncio.sleep(0.05)
    assert await tokens_over_grpc(routers, "idle") == [22] * 4
    (one,) = await listed(routers)
    assert one.refused == "idle.decode-0 refuses it: it has another shape"
    with pytest.raises(FailedPrecondition, match="another shape; unload it first"):
        await load(routers, "idle", "sql", folder)
    with routers.admin() as client:
        await in_thread(client.unload_adapter, "sql")
    with pytest.raises(FailedPrecondition, match="another shape"):
        await load(routers, "idle", "sql", folder)
    assert not await listed(routers)


class Router:
    """The operations of one of several routers, over a common registry."""

    def __init__(self, registry: MemoryRegistry, siblings: Siblings | None = None) -> None:
        self.cards = AdapterCards()
        self.operations = AdapterOperations(
            "demo",
            self.cards,
            AdaptersConfig(),
            registry,
            lambda: list(registry.entries.values()),
            siblings or Siblings(),
        )


def ready_worker(registry: MemoryRegistry, *adapters: str) -> None:
    info = WorkerInfo("decode-0", "decode", 1, "ready", "127.0.0.1:1", "m", "l", 16, 64, "h", 512)
    registry.entries[info.worker_id] = replace(info, adapters=adapters)


async def until_listed(registry: MemoryRegistry, name: str) -> None:
    async with asyncio.timeout(60):
        while name not in registry.listed:
            await asyncio.sleep(0.01)


async def test_two_routers_load_different_folders_under_one_name(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    ready_worker(registry)
    one, other = Router(registry), Router(registry)
    folders = [adapter_in(tmp_path / "a"), adapter_in(tmp_path / "b", 2.0)]
    loads = [
        asyncio.create_task(router.operations.load("sql", str(folder)))
        for router, folder in zip((one, other), folders, strict=True)
    ]
    done, pending = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
    (loser,) = done
    assert isinstance(loser.exception(), FailedPrecondition)
    (winner,) = pending
    ready_worker(registry, registry.listed["sql"].adapter_id)
    assert (await winner).served
    assert registry.listed["sql"].path == str(folders[loads.index(winner)])


async def test_two_routers_load_the_same_folder_at_once(tmp_path: Path) -> None:
    registry, folder = MemoryRegistry(), adapter_in(tmp_path / "a")
    ready_worker(registry)
    one, other = Router(registry), Router(registry)
    loads = [
        asyncio.create_task(router.operations.load("sql", str(folder))) for router in (one, other)
    ]
    await until_listed(registry, "sql")
    ready_worker(registry, id_of(folder))
    assert all(found.served for found in await asyncio.gather(*loads))


async def test_an_unload_ends_a_load_that_has_begun(tmp_path: Path) -> None:
    registry, folder = MemoryRegistry(), adapter_in(tmp_path / "a")
    ready_worker(registry)
    one, other = Router(registry), Router(registry)
    begun = asyncio.create_task(one.operations.load("sql", str(folder)))
    await until_listed(registry, "sql")
    await other.operations.unload("sql")
    ready_worker(registry, id_of(folder))
    with pytest.raises(FailedPrecondition, match="was unloaded while it was loading"):
        await begun
    assert not registry.listed
    assert one.cards.get("sql") is None


async def test_a_router_serves_an_adapter_once_it_knows_a_worker_that_has_it(
    tmp_path: Path,
) -> None:
    """Another router has loaded it, and knows the worker's last heartbeat already."""
    registry, folder = MemoryRegistry(), adapter_in(tmp_path / "a")
    ready_worker(registry)
    late = Router(registry)
    registry.listed["sql"] = AdapterEntry("sql", str(folder), id_of(folder), served=True)
    running = asyncio.create_task(late.operations.run())
    try:
        await asyncio.sleep(0.1)
        assert late.cards.get("sql") is None
        ready_worker(registry, id_of(folder))
        late.operations.look_soon()
        async with asyncio.timeout(60):
            while late.cards.get("sql") is None:
                await asyncio.sleep(0.01)
        # The worker starts anew; requests fail with a reason until it has the adapter again.
        ready_worker(registry)
        late.operations.look_soon()
        await asyncio.sleep(0.1)
        assert late.cards.get("sql") is not None
    finally:
        running.cancel()


async def test_a_long_load_does_not_delay_other_changes(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    quick, slow = adapter_in(tmp_path / "a"), adapter_in(tmp_path / "b", 2.0)
    ready_worker(registry, id_of(quick))
    router = Router(registry)
    await router.operations.load("quick", str(quick))
    begun = asyncio.create_task(router.operations.load("slow", str(slow)))
    await until_listed(registry, "slow")
    async with asyncio.timeout(10):
        await router.operations.unload("quick")
    assert router.cards.get("quick") is None
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert not registry.listed


async def test_all_processes_of_a_router_have_followed_when_a_load_returns(
    tmp_path: Path,
) -> None:
    """Though none of them reads the list by itself."""
    registry, folder = MemoryRegistry(), adapter_in(tmp_path / "a")
    siblings = [Siblings(Place(tmp_path, number, 3)) for number in range(3)]
    routers = [Router(registry, one) for one in siblings]
    ready_worker(registry, id_of(folder))
    async with answering(*(one.run() for one in siblings)):
        for asked in routers:
            await asked.operations.load("sql", str(folder))
            assert all(one.cards.get("sql") is not None for one in routers)
            await asked.operations.unload("sql")
            assert all(one.cards.get("sql") is None for one in routers)


@pytest.mark.parametrize("name", ["", "a" * 129, "a\n", "..", "%2e", "ä", "demo", "a" * 100_000])
async def test_names_that_no_adapter_can_have(tmp_path: Path, name: str) -> None:
    registry = MemoryRegistry()
    ready_worker(registry)
    with pytest.raises(KvRelayError) as caught:
        await Router(registry).operations.load(name, str(adapter_in(tmp_path / "a")))
    assert len(json.dumps(caught.value.message)) < 400
    assert not registry.listed


async def test_a_disk_that_hangs_holds_up_one_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the operator tries: reads take no threads that others need."""
    registry, good = MemoryRegistry(), adapter_in(tmp_path / "good")
    hangs, ends = str(adapter_in(tmp_path / "hangs", 2.0)), threading.Event()
    ready_worker(registry, id_of(good))

    def read(path: str, max_rank: int) -> AdapterFiles:
        if path == hangs:
            ends.wait(60)
        return read_adapter(path, max_rank)

    monkeypatch.setattr(adapter_reading, "READ_S", 0.5)
    monkeypatch.setattr(adapter_reading, "read_adapter", read)
    router = Router(registry)
    try:
        tries = [asyncio.create_task(router.operations.load("bad", hangs)) for _ in range(40)]
        await asyncio.sleep(0.05)
        assert await asyncio.to_thread(lambda: 7) == 7
        assert (await router.operations.load("good", str(good))).served
        for one in await asyncio.gather(*tries, return_exceptions=True):
            assert isinstance(one, ModelRefused)
            assert "not read within 0.5 s" in one.message
    finally:
        ends.set()
    assert list(registry.listed) == ["good"]
