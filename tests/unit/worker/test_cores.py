from __future__ import annotations

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

from kvrelay.config.schema import ClusterConfig
from kvrelay.worker.runtime.cores import Cores

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
