"""Adapters at the router: names, routing, resumption, and loading while the cluster serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import write_adapter
from support.fake_worker import answer, worker_info
from support.router_harness import RouterHarness, inference_stub, running_router
from torch import ones
from unit.router.test_end_to_end import collect, tokens_of, until

from kvrelay.client.admin import AdminClient
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvRelayError,
    NotFound,
    Unavailable,
)
from kvrelay.models.adapters.adapter_files import read_adapter
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import PoolName
from kvrelay.wire.inference import GenerateRequest, SamplingOptions, models_from_proto, pb
from router.core.dispatcher import Dispatcher
from router.core.effects import Send
from router.core.request import Request
from router.frontend import adapter_operations
from router.frontend.adapter_cards import AdapterCard, AdapterCards

PROMPT = tuple(range(10, 50))


def adapter_in(folder: Path, value: float = 1.0) -> Path:
    tensors = {
        "base_model.model.m.q.lora_A.weight": value * ones(2, 3),
        "base_model.model.m.q.lora_B.weight": ones(4, 2),
    }
    write_adapter(folder, tensors, {"r": 2, "target_modules": ["q"]})
    return folder


def id_of(folder: Path) -> str:
    return read_adapter(str(folder), 64).adapter_id


def ask(model: str = "", **more: Any) -> GenerateRequest:
    options = SamplingOptions(max_tokens=8, seed=7)
    return GenerateRequest(model=model, token_ids=PROMPT, sampling=options, **more)


def change(router: RouterHarness, worker_id: str, **changes: Any) -> None:
    """The worker's next heartbeat differs."""
    entries = router.registry.entries
    entries[worker_id] = replace(entries[worker_id], **changes)
    router.registry.announced.set()


@asynccontextmanager
async def obedient(router: RouterHarness, refuses: str = "") -> AsyncIterator[None]:
    """Workers that load and unload what the registry lists; `refuses` is the one that does not."""

    async def follow() -> None:
        while True:
            ids = tuple(one.adapter_id for one in router.registry.listed.values())
            for worker_id, info in list(router.registry.entries.items()):
                if worker_id == refuses:
                    told = tuple(f"{one} the disk is full" for one in ids)
                    if info.refused_adapters != told:
                        change(router, worker_id, refused_adapters=told)
                elif info.adapters != ids:
                    change(router, worker_id, adapters=ids)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()


async def load(router: RouterHarness, name: str, folder: Path | str) -> Any:
    def run() -> Any:
        with AdminClient(router.admin) as client:
            return client.load_adapter(name, str(folder))

    return await asyncio.to_thread(run)


async def unload(router: RouterHarness, name: str) -> None:
    def run() -> None:
        with AdminClient(router.admin) as client:
            client.unload_adapter(name)

    await asyncio.to_thread(run)


@pytest.fixture
async def router() -> AsyncIterator[RouterHarness]:
    async with running_router() as running:
        yield running


async def test_a_loaded_adapter_is_a_model_of_its_own(
    router: RouterHarness, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "sql-lora")
    async with obedient(router), inference_stub(router.grpc) as stub:
        loaded = await load(router, "sql", folder)
        assert (loaded.name, loaded.adapter_id, loaded.workers) == ("sql", id_of(folder), 2)
        models = models_from_proto(await stub.ListModels(pb.ListModelsRequest()))
        assert [(one.id, one.parent, one.root) for one in models] == [
            ("demo", "", "demo"),
            ("sql", "demo", "sql-lora"),
        ]
        async with httpx.AsyncClient(base_url=router.http) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [(one["id"], one["parent"]) for one in listed] == [
                ("demo", None),
                ("sql", "demo"),
            ]
            assert (await http.get("/v1/models/sql")).json()["root"] == "sql-lora"
            body = {"model": "sql", "prompt": list(PROMPT), "max_tokens": 3, "temperature": 0}
            assert (await http.post("/v1/completions", json=body)).json()["model"] == "sql"

        responses = await collect(stub, ask("sql"))
        assert tokens_of(responses) == answer(PROMPT, 7, 8)
        fingerprint = responses[-1].system_fingerprint
        assert fingerprint.endswith(f".{id_of(folder)}")
        assert not (await collect(stub, ask()))[-1].system_fingerprint.endswith(id_of(folder))

        await unload(router, "sql")
        with pytest.raises(NotFound, match="'sql' does not exist"):
            await collect(stub, ask("sql"))


async def test_an_unknown_name_is_answered_with_the_nearest(
    router: RouterHarness, tmp_path: Path
) -> None:
    async with obedient(router), inference_stub(router.grpc) as stub:
        await load(router, "customer-sql", adapter_in(tmp_path / "a"))
        with pytest.raises(NotFound, match=r"and 1 adapter, .*did you mean 'customer-sql'\?"):
            await collect(stub, ask("customer_sql"))
        with pytest.raises(NotFound, match=r"see /v1/models$"):
            await collect(stub, ask("x" * 5000))


NAMES = st.text("abcdefgh-/.", min_size=1, max_size=128)


@given(st.sets(NAMES, max_size=8), NAMES | st.text())
def test_the_suggested_name_is_served_and_the_nearest(names: set[str], asked: str) -> None:
    cards = AdapterCards(tuple(AdapterCard(name, "0" * 32, "root") for name in sorted(names)))
    assert cards.near(asked, "base model") in {"", "base model", *names}
    for name in names:
        assert cards.near(name.upper(), "base model") in names
        # Nothing has a character in common with it.
        assert cards.near(len(name) * "z", "base model") == ""


async def test_the_number_of_names_is_bounded(
    router: RouterHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_operations, "MAX_NAMES", 2)
    folder = adapter_in(tmp_path / "a")
    async with obedient(router):
        await load(router, "one", folder)
        await load(router, "two", folder)
        with pytest.raises(FailedPrecondition, match="2 names are loaded; unload one first"):
            await load(router, "three", folder)
        await unload(router, "one")
        await load(router, "three", folder)


async def test_an_adapter_that_one_worker_refuses_is_loaded_nowhere(
    router: RouterHarness, tmp_path: Path
) -> None:
    async with obedient(router, refuses="decode-0"), inference_stub(router.grpc) as stub:
        with pytest.raises(FailedPrecondition, match="decode-0 refuses it: the disk is full"):
            await load(router, "sql", adapter_in(tmp_path / "a"))
        assert not router.registry.listed
        with pytest.raises(NotFound):
            await collect(stub, ask("sql"))


async def test_a_worker_that_gets_no_work_has_no_say(router: RouterHarness, tmp_path: Path) -> None:
    """It belongs to another cluster on the same Redis."""
    await router.add("decode-1", "decode")
    change(router, "decode-1", vocab_size=7)
    async with obedient(router, refuses="decode-1"), inference_stub(router.grpc) as stub:
        async with asyncio.timeout(60):
            while "decode-1" not in await misfits(router):
                await asyncio.sleep(0.05)
        loaded = await load(router, "sql", adapter_in(tmp_path / "a"))
        assert (loaded.workers, loaded.refused) == (2, "")
        assert tokens_of(await collect(stub, ask("sql"))) == answer(PROMPT, 7, 8)


async def misfits(router: RouterHarness) -> set[str]:
    def ask_status() -> set[str]:
        with AdminClient(router.admin) as client:
            workers = [one for pool in client.status().pools for one in pool.workers]
        return {one.worker_id for one in workers if one.unfit}

    return await asyncio.to_thread(ask_status)


async def test_what_cannot_be_loaded_is_refused_before_any_worker_sees_it(
    router: RouterHarness, tmp_path: Path
) -> None:
    folder, other = adapter_in(tmp_path / "a"), adapter_in(tmp_path / "b", 2.0)
    cases: list[tuple[str, Path | str, type[KvRelayError], str]] = [
        ("demo", folder, FailedPrecondition, "is the name of the base model"),
        ("a b", folder, InvalidArgument, "is not the name of a model"),
        ("sql", "a", InvalidArgument, "is not the absolute path"),
        ("sql", "/nul\x00", InvalidArgument, "is not the absolute path"),
        ("sql", tmp_path / "nowhere", InvalidArgument, "there is no such folder"),
    ]
    async with obedient(router):
        for name, path, error, text in cases:
            with pytest.raises(error, match=text):
                await load(router, name, path)
        assert not router.registry.listed
        first = await load(router, "sql", folder)
        assert await load(router, "sql", folder) == first
        with pytest.raises(FailedPrecondition, match="unload it first"):
            await load(router, "sql", other)
        with pytest.raises(NotFound, match="is not loaded"):
            await unload(router, "qsl")


async def test_tokens_of_another_version_are_not_continued(
    router: RouterHarness, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "a")
    async with obedient(router), inference_stub(router.grpc) as stub:
        await load(router, "sql", folder)
        responses = await collect(stub, ask("sql"))
        tokens, fingerprint = tokens_of(responses), responses[-1].system_fingerprint
        resumed = ask("sql", resume=tuple(tokens[:3]), system_fingerprint=fingerprint)
        assert tokens_of(await collect(stub, resumed), first=3) == tokens[3:]
        with pytest.raises(FailedPrecondition, match="'demo' is now the base model"):
            await collect(stub, replace(resumed, model=""))
        await unload(router, "sql")
        await load(router, "sql", adapter_in(tmp_path / "b", 2.0))
        with pytest.raises(FailedPrecondition, match="the tokens in resume are from version"):
            await collect(stub, resumed)


async def test_other_routers_serve_what_one_router_loaded(
    router: RouterHarness, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "a")
    async with obedient(router), inference_stub(router.grpc) as stub:
        await load(router, "sql", folder)
        entry = router.registry.listed["sql"]
        router.registry.listed["chat"] = replace(entry, name="chat")
        router.registry.listed["half"] = replace(entry, name="half", served=False)

        async def is_served(name: str) -> bool:
            try:
                await collect(stub, ask(name))
            except NotFound:
                return False
            return True

        async with asyncio.timeout(60):
            while not await is_served("chat"):
                await asyncio.sleep(0.05)
        assert not await is_served("half")


async def test_the_load_of_a_router_that_has_ended_can_be_repeated(
    router: RouterHarness, tmp_path: Path
) -> None:
    folder = adapter_in(tmp_path / "sql")
    await router.registry.put_adapter(AdapterEntry("sql", str(folder), id_of(folder)))
    async with obedient(router):
        found = await load(router, "sql", folder)
    assert found.served
    assert router.registry.listed["sql"].served


async def test_the_load_of_a_router_that_has_ended_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_operations, "FOLLOW_S", 0.01)
    monkeypatch.setattr(adapter_operations, "ABANDONED_S", 0.05)
    async with running_router() as router, asyncio.timeout(60):
        folder = adapter_in(tmp_path / "sql")
        entry = AdapterEntry("sql", str(folder), id_of(folder))
        for one in (entry, replace(entry, name="served")):
            await router.registry.put_adapter(one)
        await router.registry.put_adapter(replace(entry, name="served", served=True))
        while "sql" in router.registry.listed:
            await asyncio.sleep(0.01)
        assert list(router.registry.listed) == ["served"]


async def test_a_request_whose_adapter_is_gone_fails_with_a_reason(
    router: RouterHarness, tmp_path: Path
) -> None:
    async with inference_stub(router.grpc) as stub:
        async with obedient(router):
            await load(router, "sql", adapter_in(tmp_path / "a"))
        for worker_id in router.workers:
            change(router, worker_id, adapters=())
        caught: list[Unavailable] = []

        async def gone() -> None:
            try:
                await collect(stub, ask("sql"))
            except Unavailable as error:
                caught.append(error)

        async with asyncio.timeout(60):
            while not caught:
                await gone()
        assert "no worker has version" in caught[0].message
        await until(lambda: not any(one.worker.sequences for one in router.workers.values()))


ADAPTERS = ("", "a" * 32, "b" * 32)


@given(st.data())
def test_only_workers_with_the_adapter_get_the_request(data: st.DataObject) -> None:
    """Whatever the workers have, a request goes to workers that have its adapter, or waits, and
    does not hold up others.
    """
    dispatcher = Dispatcher(ClusterConfig.model_validate({"router": {"local_below_tokens": 8}}))
    held: dict[str, tuple[str, ...]] = {}
    pools: list[PoolName] = ["prefill", "prefill", "decode", "decode"]
    for number, pool in enumerate(pools):
        worker_id = f"{pool}-{number}"
        held[worker_id] = tuple(data.draw(st.sets(st.sampled_from(ADAPTERS[1:]))))
        info = replace(worker_info(worker_id, pool), adapters=held[worker_id])
        dispatcher.worker_found(info, 0.0)
    for number in range(6):
        adapter = data.draw(st.sampled_from(ADAPTERS))
        request = Request(
            f"{number}",
            PROMPT,
            SamplingParams(max_tokens=4, seed=1),
            arrival=0.0,
            deadline=100.0,
            adapter=adapter,
        )
        life, effects = dispatcher.submit(request, 0.0)
        decoders = [
            one
            for one in held
            if one.startswith("decode") and (not adapter or adapter in held[one])
        ]
        assert bool(decoders) == (life.state != "failed")
        for effect in effects:
            if isinstance(effect, Send):
                assert not adapter or adapter in held[effect.worker_id]
                assert effect.command.spec.adapter == adapter  # type: ignore[union-attr]
        if life.assignment is not None and adapter:
            assert adapter in held[life.assignment.decode]
            assert not life.assignment.prefill or adapter in held[life.assignment.prefill]
