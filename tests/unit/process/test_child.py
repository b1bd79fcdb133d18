from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.process.child import command_of, family, kill, send_signal, signal_name, stop

# Of child watchers, from Python 3.12 on
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def _waits_on_the_loop() -> Iterator[None]:
    """As it is from Python 3.12 on, so that nobody waits for a child while the loop is held."""
    if sys.version_info >= (3, 12):
        yield
        return
    before = asyncio.get_child_watcher()
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    asyncio.set_child_watcher(before)


def test_a_process_may_end_while_its_name_is_read() -> None:
    names = set()
    for _ in range(100):
        process = subprocess.Popen(["true"])
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        while name := command_of(process.pid):
            names.add(name)
        reaper.join()
    assert names


@pytest.mark.usefixtures("_waits_on_the_loop")
async def test_who_has_ended_keeps_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(600)"
    )
    os.kill(process.pid, signal.SIGKILL)
    while command_of(process.pid):
        pass
    with caplog.at_level(logging.WARNING, "asyncio"):
        send_signal(process, signal.SIGTERM)
        assert await process.wait() == -signal.SIGKILL
    send_signal(process, signal.SIGTERM)
    assert not caplog.records


def test_a_stopped_process_that_is_killed_has_ended() -> None:
    # Memory that the kernel has to free takes it a moment.
    script = "import signal; held = bytearray(2**28); signal.raise_signal(signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        kill(process.pid, 60_000)
        assert not command_of(process.pid)
    kill(process.pid, 0)


@pytest.mark.parametrize(("deaf", "code"), [(False, -signal.SIGTERM), (True, -signal.SIGKILL)])
async def test_who_does_not_hear_is_ended(deaf: bool, code: int) -> None:
    script = (
        f"import signal, time; {deaf} and signal.signal(15, signal.SIG_IGN); print(flush=True); "
        f"time.sleep(600)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    assert await stop(process, 0.5 if deaf else 60.0) == code
    assert await stop(process, 60.0) == code


def test_a_family_is_a_process_and_all_below_it() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    top = subprocess.Popen([sys.executable, "-c", f"{nested}"], stdin=subprocess.PIPE, text=True)
    try:
        while len(found := family(top.pid)) < 2:
            assert top.poll() is None
        assert found[0] == top.pid
    finally:
        top.communicate("\n")
    assert family(top.pid) == [top.pid]


def test_a_thread_that_ends_meanwhile_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    listed = Path.iterdir

    def with_one_that_is_gone(folder: Path) -> list[Path]:
        return [folder / "999999999", *listed(folder)]

    monkeypatch.setattr(Path, "iterdir", with_one_that_is_gone)
    try:
        assert child.pid in family(os.getpid())
    finally:
        child.communicate("\n")


@pytest.mark.parametrize("number", range(1, signal.SIGRTMAX + 1))
def test_every_signal_has_a_name(number: int) -> None:
    assert signal_name(number)
    assert signal_name(signal.SIGKILL) == "SIGKILL"
