"""Workers that are forked from a process which has imported what they need, as their actors see
them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ModelRefused, Unavailable
from kvrelay.launch import template_process
from kvrelay.launch.actor import WorkerActor
from kvrelay.launch.forked_worker import ForkedWorker, settings_from_json, settings_to_json
from kvrelay.launch.pool_switch import Roles
from kvrelay.launch.worker_template import Template
from kvrelay.process.child import command_of
from kvrelay.process.owned_folder import remove_abandoned_folders
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import StandbyWorker, WorkerInfo
from kvrelay.worker.runtime.settings import WorkerSettings

CONFIG = ClusterConfig.model_validate({"model": {"dtype": "float32"}, "kv": {"memory": "4MiB"}})
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def template() -> Iterator[str]:
    with Template(1) as running:
        yield running.path


@pytest.fixture
async def redis() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as running:
        yield running


def settings(model: Path | str, redis: EmbeddedRedis, *, standby: bool = False) -> WorkerSettings:
    return WorkerSettings("one-0", "decode", str(model), redis.url, CONFIG, standby=standby)


async def ready(registry: Registry) -> WorkerInfo:
    async with asyncio.timeout(120):
        while True:
            for info in await registry.workers():
                if info.state == "ready":
                    return info
            await asyncio.sleep(0.05)


async def standing_by(registry: Registry) -> StandbyWorker:
    while True:
        for one in await registry.standbys():
            if one.state == "ready":
                return one
        await asyncio.sleep(0.05)


async def gone(pid: int) -> None:
    async with asyncio.timeout(120):
        while command_of(pid):
            await asyncio.sleep(0.05)


async def test_a_forked_worker_stands_by_joins_a_pool_and_drains(
    tiny_model: Callable[..., Path], template: str, redis: EmbeddedRedis
) -> None:
    async with await Registry.connect(redis.url) as registry:
        worker = await ForkedWorker.ask(
            template, settings(tiny_model("llama"), redis, standby=True), {"LANG": "C"}
        )
        assert await worker.started()
        waiting = await standing_by(registry)
        assert waiting.pid != os.getpid()
        assert await registry.workers() == (), "it is of no pool"
        worker.tell(turn="prefill")
        info = await ready(registry)
        assert (info.worker_id, info.pool, info.pid) == ("one-0", "prefill", waiting.pid)
        worker.tell(drain=True)
        await worker.ended()
        assert await registry.workers() == ()


async def test_its_death_is_told_at_once_and_the_next_is_forked(
    tiny_model: Callable[..., Path], template: str, redis: EmbeddedRedis
) -> None:
    async with await Registry.connect(redis.url) as registry:
        for _ in range(2):
            worker = await ForkedWorker.ask(template, settings(tiny_model("llama"), redis), {})
            assert await worker.started()
            info = await ready(registry)
            os.kill(info.pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="worker process ended"):
                await worker.ended()
            await registry.remove_worker(info.worker_id, info.epoch)


async def test_it_ends_with_its_actor(
    tiny_model: Callable[..., Path], template: str, redis: EmbeddedRedis
) -> None:
    async with await Registry.connect(redis.url) as registry:
        worker = await ForkedWorker.ask(template, settings(tiny_model("llama"), redis), {})
        info = await ready(registry)
        worker._writer.close()
        await gone(info.pid)


_ACTOR = """
import asyncio, json, sys
from kvrelay.launch.forked_worker import ForkedWorker, settings_from_json

async def main():
    worker = await ForkedWorker.ask(sys.argv[1], settings_from_json(json.loads(sys.argv[2])), {})
    assert await worker.started()
    await worker.ended()

asyncio.run(main())
"""


# Without the template's end it takes orphans.KILL_S; test_orphans.py shows that in virtual time.
@pytest.mark.long
@pytest.mark.parametrize("template_ends", [pytest.param(False, marks=pytest.mark.long), True])
async def test_a_frozen_worker_is_killed_after_its_actor(
    tiny_model: Callable[..., Path], redis: EmbeddedRedis, template_ends: bool
) -> None:
    wanted = json.dumps(settings_to_json(settings(tiny_model("llama"), redis)))
    async with await Registry.connect(redis.url) as registry:
        with Template(1) as own:
            actor = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _ACTOR, own.path, wanted
            )
            info = await ready(registry)
            os.kill(info.pid, signal.SIGSTOP)
            actor.kill()
            await actor.wait()
            if not template_ends:
                await gone(info.pid)
        await gone(info.pid)


@pytest.mark.long
async def test_who_asks_before_the_template_has_imported_waits(
    tiny_model: Callable[..., Path], redis: EmbeddedRedis
) -> None:
    folder = tiny_model("llama")
    with Template(1) as young:
        worker = await ForkedWorker.ask(young.path, settings(folder, redis), {})
        assert await worker.started()
        worker.tell(stop=True)
        await worker.ended()
    with pytest.raises(FileNotFoundError):
        await ForkedWorker.ask(young.path, settings(folder, redis), {})


async def test_what_it_ends_of_comes_back_as_that(
    template: str, redis: EmbeddedRedis, tmp_path: Path
) -> None:
    worker = await ForkedWorker.ask(template, settings(tmp_path, redis), {})
    assert await worker.started()
    with pytest.raises(ModelRefused, match=str(tmp_path)):
        await worker.ended()


async def test_a_long_error_comes_back_as_that(tmp_path: Path) -> None:
    """Longer than asyncio's lines."""

    async def template(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = {"error": "Unavailable", "message": "x" * 2**17}
        writer.write(b"{}\n" + json.dumps(end).encode() + b"\n")
        await writer.drain()
        writer.close()

    path = str(tmp_path / "template")
    async with await asyncio.start_unix_server(template, path):
        asked = WorkerSettings("one-0", "decode", "demo", "redis://127.0.0.1:1", CONFIG)
        worker = await ForkedWorker.ask(path, asked, {})
        assert await worker.started()
        with pytest.raises(Unavailable, match="xxx"):
            await worker.ended()


@pytest.mark.parametrize("orders", ["", '{"stop": true}\n'])
def test_an_actor_that_goes_once_the_worker_has_ended_makes_no_noise(
    orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that listens to it may come by after the event loop has been closed."""
    exits: list[int] = []
    monkeypatch.setattr(template_process, "_ORPHAN_S", 0.0)
    monkeypatch.setattr(template_process.os, "_exit", exits.append)
    loop = asyncio.new_event_loop()
    loop.close()
    template_process._take_orders(StringIO(orders), Roles(), loop)
    assert exits == [1]


async def test_orders_that_come_before_the_fork_are_kept(
    tiny_model: Callable[..., Path], template: str, redis: EmbeddedRedis
) -> None:
    """A standby worker that still starts may be wanted in a pool already."""
    async with await Registry.connect(redis.url) as registry:
        actor = WorkerActor(settings(tiny_model("llama"), redis, standby=True), {}, template)
        await actor.turn("prefill")
        running = asyncio.create_task(actor.run())
        assert (await ready(registry)).pool == "prefill"
        await actor.drain()
        await running


async def test_without_a_template_the_actor_serves_by_itself(
    tiny_model: Callable[..., Path], redis: EmbeddedRedis, tmp_path: Path
) -> None:
    async with await Registry.connect(redis.url) as registry:
        actor = WorkerActor(settings(tiny_model("llama"), redis), {}, str(tmp_path / "nothing"))
        running = asyncio.create_task(actor.run())
        assert (await ready(registry)).pid == os.getpid()
        await actor.drain()
        await running


def test_settings_come_out_as_they_went_in() -> None:
    config = ClusterConfig.model_validate(
        {"decode": {"kv": {"dtype": "int8"}, "speculation": {"tokens": 2}}}
    )
    made = WorkerSettings(
        "decode-3", "decode", "demo", "redis://127.0.0.1:6379/0", config, pin=True, last_epoch=4
    )
    for one in (made, replace(made, standby=True)):
        assert settings_from_json(settings_to_json(one)) == one


@pytest.mark.parametrize(
    ("unlike", "suits"),
    [({}, True), ({"threads": 2}, False), ({"resources": {"num_gpus": 1}}, False)],
)
@pytest.mark.sweep(3)
def test_workers_are_forked_where_all_can_be(unlike: dict[str, object], suits: bool) -> None:
    assert Template.suits(ClusterConfig.model_validate({"prefill": unlike})) == suits


_LAUNCHER = """
import sys
from kvrelay.launch.worker_template import Template
with Template(1) as running:
    print(running.path, flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_the_folder_of_a_launcher_that_is_killed_is_removed_later(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        text=True,
    )
    assert launcher.stdout is not None
    assert Path(launcher.stdout.readline().strip()).is_relative_to(tmp_path)
    launcher.kill()
    launcher.communicate()
    assert list(tmp_path.iterdir()) != []
    remove_abandoned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []
