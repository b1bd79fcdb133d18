from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from kvrelay.process.child import command_of, send_signal, stop

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
