from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.worker_harness import workers

import kvrelay.worker.runtime.cores
from kvrelay.config.schema import ClusterConfig
from kvrelay.worker.runtime.cores import Cores, _activity

HERE = os.sched_getaffinity(0)

HOLDER = """
import sys
from pathlib import Path
from kvrelay.worker.runtime.cores import Cores
cores = Cores(int(sys.argv[1]), Path(sys.argv[2]))
print(*sorted(cores.taken), flush=True)
sys.stdin.read()
"""


def free(folder: Path | None = None) -> set[int]:
    """Of the cores here, all or none: what an engine that wants as many would get."""
    cores = Cores(len(HERE), folder)
    taken = set(cores.taken)
    cores.release()
    return taken


@contextmanager
def holder(count: int, folder: Path) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """Another process that takes cores, and what it got."""
    command = [sys.executable, "-c", HOLDER, str(count), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, {int(core) for core in process.stdout.readline().split()}
        finally:
            process.kill()


def test_a_core_has_one_taker(tmp_path: Path) -> None:
    ours = Cores(1, tmp_path)
    with holder(len(HERE), tmp_path) as (_, none), holder(len(HERE) - 1, tmp_path) as (_, others):
        assert none == set()
        assert others == HERE - ours.taken
        assert Cores(1, tmp_path).taken == set()
    ours.release()
    assert ours.taken == set()
    assert free(tmp_path) == HERE


def test_the_dead_hold_nothing(tmp_path: Path) -> None:
    with holder(len(HERE), tmp_path) as (process, taken):
        assert taken == HERE
        assert Cores(1, tmp_path).taken == set()
        process.kill()
        process.wait()
        assert free(tmp_path) == HERE


def test_a_child_does_not_keep_what_its_parent_took(tmp_path: Path) -> None:
    ours = Cores(len(HERE), tmp_path)
    command = [sys.executable, "-c", "print('runs', flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"
        ours.release()
        assert free(tmp_path) == HERE
        child.kill()


def test_too_few_are_none(tmp_path: Path) -> None:
    cores = Cores(len(HERE) + 1, tmp_path)
    assert cores.taken == set()
    cores.pin()
    assert os.sched_getaffinity(0) == HERE
    assert free(tmp_path) == HERE
    assert Cores(0, tmp_path).taken == set()


def test_pin_binds_the_calling_thread_and_those_it_starts(tmp_path: Path) -> None:
    cores = Cores(1, tmp_path)
    seen: list[set[int]] = []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))

    def engine() -> None:
        cores.pin()
        look()
        helper = threading.Thread(target=look)
        helper.start()
        helper.join()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [cores.taken, cores.taken]
    assert os.sched_getaffinity(0) == HERE


@pytest.mark.parametrize("pin", [True, False])
async def test_a_worker_that_is_told_to_pins_its_engine(
    pin: bool, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = ClusterConfig.model_validate({"kv": {"memory": "4MiB"}})
    async with workers(tiny_model("llama"), config, "decode-0", pin=pin):
        engines = [thread for thread in threading.enumerate() if thread.name.startswith("engine")]
        bound = [
            os.sched_getaffinity(thread.native_id)
            for thread in engines
            if thread.native_id is not None
        ]
        if pin:
            assert {min(HERE)} in bound
            assert free() == set()
        else:
            assert all(affinity == HERE for affinity in bound)
            assert free() == HERE
    assert free() == HERE, "given back at the end"


@contextmanager
def bound_thread(cores: Cores) -> Iterator[int]:
    """A busy thread that is bound to the cores, and its id."""
    begun, end = threading.Event(), threading.Event()
    ids: list[int] = []

    def busy() -> None:
        cores.pin()
        ids.append(threading.get_native_id())
        begun.set()
        while not end.is_set():
            pass

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert begun.wait(60)
        yield ids[0]
    finally:
        end.set()
        thread.join()


@pytest.mark.skipif(len(HERE) == 1, reason="a single core cannot be taken from others")
async def test_a_thread_that_others_keep_from_running_may_use_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel starves no thread on demand, so the test says that it does."""
    cores = Cores(1, tmp_path)
    with bound_thread(cores) as thread:
        assert os.sched_getaffinity(thread) == cores.taken
        watch = asyncio.create_task(cores.watch())
        monkeypatch.setattr(kvrelay.worker.runtime.cores, "_activity", lambda thread: (True, 1))
        async with asyncio.timeout(60):
            while os.sched_getaffinity(thread) != HERE:
                await asyncio.sleep(0.01)
        assert free(tmp_path) == HERE, "another engine may take them"
        watch.cancel()


@pytest.mark.skipif(len(HERE) == 1, reason="a single core cannot be taken from others")
@pytest.mark.parametrize("activity", ["runs", "sleeps"])
async def test_a_thread_that_runs_or_sleeps_keeps_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activity: str
) -> None:
    looks = iter(range(10))
    looked = asyncio.Event()

    def look(thread: int) -> tuple[bool, int]:
        number = next(looks, None)
        if number is None:
            looked.set()
        return activity == "runs", (number or 0) if activity == "runs" else 1

    monkeypatch.setattr(kvrelay.worker.runtime.cores, "_activity", look)
    monkeypatch.setattr(kvrelay.worker.runtime.cores, "POLL_S", 0.001)
    cores = Cores(1, tmp_path)
    with bound_thread(cores) as thread:
        watch = asyncio.create_task(cores.watch())
        await looked.wait()
        assert os.sched_getaffinity(thread) == cores.taken
        watch.cancel()
    cores.release()


def test_the_kernel_tells_what_a_thread_does() -> None:
    with bound_thread(Cores(0)) as thread:
        runs, ticks = _activity(thread)
        assert runs
        while _activity(thread)[1] == ticks:
            pass
