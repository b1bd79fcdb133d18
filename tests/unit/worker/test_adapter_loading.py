"""Adapters that the registry lists: workers load and unload them while they serve."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.adapters import greedy, merged, save_adapter
from support.worker_harness import SERVE, Engine, Workers, new_registry, workers
from unit.worker.test_adapted_relay import COUNT, PROMPT, config_of, local, relay, spec

from kvrelay.engine.model.adapter_table import AdapterTable
from kvrelay.models.adapters import adapter_reading
from kvrelay.models.adapters.adapter_files import AdapterFiles, read_adapter
from kvrelay.process.stop_request import StopRequest
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker.runtime import adapter_loading
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker_messages import Refused, RunLocal


def entry(folder: Path, adapter_id: str = "") -> AdapterEntry:
    return AdapterEntry(folder.name, str(folder), adapter_id or spec("x", folder).adapter)


async def until(running: Workers, true: Callable[[WorkerInfo], bool]) -> Sequence[WorkerInfo]:
    """Waits until all heartbeats say so."""
    async with asyncio.timeout(120):
        while not all(map(true, infos := await running.registry.workers())):
            await asyncio.sleep(0.05)
    return infos


@pytest.fixture
def base(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


async def test_workers_follow_the_list(base: Path, tmp_path: Path) -> None:
    stays, comes = (save_adapter(tmp_path / f"{i}", base, seed=i) for i in (1, 2))
    loaded, configured = spec("x", comes).adapter, spec("x", stays).adapter
    expected = greedy(merged(base, comes), PROMPT, COUNT)
    async with workers(base, config_of(stays), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await running.registry.put_adapter(entry(comes))
        await until(running, lambda info: info.adapters == (configured, loaded))
        assert (await relay(prefill, decode, spec("a", comes)))[0] == expected
        assert await local(decode, spec("b", comes)) == expected
        await running.registry.remove_adapter(comes.name)
        await until(running, lambda info: info.adapters == (configured,))
        await decode.send(RunLocal(spec("c", comes)))
        assert await decode.event() == Refused("c", 0, "adapter")
        # Loaded again, it finds the KV of the same bytes, and gives the same answer.
        await running.registry.put_adapter(entry(comes))
        await until(running, lambda info: loaded in info.adapters)
        assert await local(decode, spec("d", comes)) == expected


async def test_a_running_answer_keeps_an_adapter_that_is_unloaded(
    base: Path, tmp_path: Path, engine: Engine
) -> None:
    folder = save_adapter(tmp_path / "one", base)
    expected = greedy(merged(base, folder), PROMPT, COUNT)
    async with workers(base, config_of(), "decode-0") as running:
        decode = await running.session("decode-0")
        await running.registry.put_adapter(entry(folder))
        await until(running, lambda info: bool(info.adapters))
        engine.free.clear()
        engine.start()
        await decode.send(RunLocal(spec("a", folder)))
        await engine.held()
        await running.registry.remove_adapter(folder.name)
        await until(running, lambda info: not info.adapters)
        await decode.send(RunLocal(spec("b", folder)))
        assert await decode.event() == Refused("b", 0, "adapter")
        engine.free.set()
        assert await decode.answer() == expected


class Meddled(set[str]):
    """A set in which another thread does something at every question and after every change."""

    def __init__(self, values: set[str], other_thread: Callable[[], object]) -> None:
        super().__init__(values)
        self._other_thread = other_thread

    def __contains__(self, one: object) -> bool:
        found = super().__contains__(one)
        self._other_thread()
        return found

    def discard(self, one: str) -> None:
        super().discard(one)
        self._other_thread()


def table_with(*adapter_ids: str) -> AdapterTable:
    """A table in which these adapters have slots."""
    table = AdapterTable(None, 0, native=False, refused="it has no model")
    table._slots = {one: slot for slot, one in enumerate(adapter_ids)}
    table._bytes = dict.fromkeys(adapter_ids, 0)
    return table


def test_an_adapter_is_not_served_while_it_is_removed() -> None:
    table, seen = table_with("a", "b"), list[object]()
    table._retired = Meddled({"a"}, lambda: seen.append(table.held))
    table.remove("a")
    assert seen == [("b",)], "it has no slot once it is not retired"


def test_an_adapter_that_is_removed_during_the_question_is_not_served() -> None:
    table = table_with("a", "b")

    class Slots(dict[str, int]):
        def __contains__(self, one: object) -> bool:
            found = super().__contains__(one)
            table.remove("a")
            return found

    table._slots = Slots(table._slots)
    table.retire("a")
    assert not table.serves("a")


def test_adapters_may_be_removed_while_they_are_listed() -> None:
    table = table_with("a", "b", "c")
    table._retired = Meddled({"b"}, lambda: table._slots.pop("b", None))
    assert table.ids == ("a", "c")


async def test_what_a_worker_cannot_load_it_tells(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save_adapter(tmp_path / "good", base)
    odd = save_adapter(tmp_path / "odd", base, seed=3)
    prepare = AdapterTable.prepare

    def raising(table: AdapterTable, files: object, name: str) -> object:
        if name == "odd":
            raise RuntimeError("no more memory\n" + 2000 * "x")
        return prepare(table, files, name)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterTable, "prepare", raising)
    async with workers(base, config_of(), "decode-0") as running:
        await running.registry.put_adapter(entry(tmp_path / "missing", "a" * 32))
        other = AdapterEntry("other bytes", str(good), "b" * 32)
        await running.registry.put_adapter(other)
        await running.registry.put_adapter(entry(odd))
        await running.registry.put_adapter(entry(good))
        (info,) = await until(running, lambda one: len(one.refused_adapters) == 3)
        (info,) = await until(running, lambda one: bool(one.adapters))
        assert info.adapters == (entry(good).adapter_id,)
        told = dict(text.split(" ", 1) for text in info.refused_adapters)
        assert "there is no such folder" in told["a" * 32]
        assert "the files here are version" in told["b" * 32]
        assert "no more memory" in told[entry(odd).adapter_id]
        await running.registry.remove_adapter(other.name)
        await until(running, lambda one: len(one.refused_adapters) == 2)


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> list[WorkerInfo]:
    """The heartbeats of all workers, as they are published."""
    published: list[WorkerInfo] = []
    publish = Registry.publish_worker

    async def note(registry: Registry, info: WorkerInfo, ttl_s: float) -> None:
        published.append(info)
        await publish(registry, info, ttl_s)

    monkeypatch.setattr(Registry, "publish_worker", note)
    return published


async def first_heartbeat(
    base: Path, heartbeats: list[WorkerInfo], *entries: AdapterEntry
) -> WorkerInfo:
    """What a worker that starts while these adapters are listed says of itself first."""
    stop = StopRequest()
    async with new_registry() as (url, registry), asyncio.TaskGroup() as tasks:
        for one in entries:
            await registry.put_adapter(one)
        settings = WorkerSettings("decode-0", "decode", str(base), url, config_of())
        tasks.create_task(SERVE["decode"](settings, stop))
        async with asyncio.timeout(60):
            while not heartbeats:
                await asyncio.sleep(0.02)
        stop.now()
    return heartbeats[0]


async def test_a_worker_has_the_listed_adapters_when_it_registers(
    base: Path, tmp_path: Path, heartbeats: list[WorkerInfo]
) -> None:
    one, missing = entry(save_adapter(tmp_path / "one", base)), entry(tmp_path / "gone", "a" * 32)
    first = await first_heartbeat(base, heartbeats, missing, one)
    assert first.adapters == (one.adapter_id,)
    assert len(first.refused_adapters) == 1


async def test_a_folder_that_hangs_delays_the_registration_only_for_some_time(
    base: Path, tmp_path: Path, heartbeats: list[WorkerInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ends = entry(save_adapter(tmp_path / "one", base)), threading.Event()
    monkeypatch.setattr(adapter_loading, "START_S", 0.2)
    monkeypatch.setattr(adapter_reading, "read_adapter", lambda *_: ends.wait(60))
    try:
        first = await first_heartbeat(base, heartbeats, one)
    finally:
        ends.set()
    assert first.adapters == ()


async def test_a_folder_that_hangs_does_not_keep_others_from_being_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, good = entry(save_adapter(tmp_path / "a", base)), tmp_path / "b"
    follows, ends = entry(save_adapter(good, base, seed=1)), threading.Event()

    def read(path: str, max_rank: int) -> AdapterFiles:
        if path == hangs.path:
            ends.wait(60)
        return read_adapter(path, max_rank)

    monkeypatch.setattr(adapter_reading, "READ_S", 0.2)
    monkeypatch.setattr(adapter_reading, "read_adapter", read)
    try:
        async with workers(base, config_of(), "decode-0") as running:
            await running.registry.put_adapter(hangs)
            await running.registry.put_adapter(follows)
            (info,) = await until(running, lambda one: bool(one.adapters))
            assert info.adapters == (follows.adapter_id,)
            (told,) = info.refused_adapters
            assert told.startswith(hangs.adapter_id)
            assert "not read within 0.2 s" in told
    finally:
        ends.set()
