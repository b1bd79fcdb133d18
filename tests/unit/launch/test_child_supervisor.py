"""The supervision of a child process: a machine that cannot start a process now may do so later."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from structlog.testing import capture_logs

from kvrelay.errors import ConfigError
from kvrelay.launch import child_supervisor
from kvrelay.launch.child_command import ChildCommand
from kvrelay.launch.child_supervisor import ChildSupervisor

FAILURES = [
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
]


async def test_it_backs_off_until_a_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_supervisor, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_supervisor, "MAX_DELAY_S", 0.04)
    failures, restarted = list(FAILURES), asyncio.Event()

    async def start() -> ChildCommand:
        if controller._child is not None and failures:
            raise failures.pop(0)
        process = await asyncio.create_subprocess_exec("sleep", "600")
        if controller._child is not None:
            restarted.set()
        return ChildCommand("controller", process)

    controller = ChildSupervisor("controller", start, 45.0)
    await controller.start()
    first = controller.child
    controller.supervise()
    ended = asyncio.create_task(controller.end())
    with capture_logs() as logs:
        first.process.kill()
        async with asyncio.timeout(60):
            await asyncio.wait(
                {ended, asyncio.create_task(restarted.wait())},
                return_when=asyncio.FIRST_COMPLETED,
            )
    assert not ended.done(), "the supervision goes on"
    assert controller.child is not first
    assert controller.child.process.returncode is None
    assert [one["wait_s"] for one in logs if one["event"] == "controller_start_failed"] == [
        0.01,
        0.02,
        0.04,
        0.04,
    ]
    ended.cancel()
    await controller.stop()
    assert controller.child.process.returncode is not None


@pytest.mark.parametrize("is_configured", [False, True])
async def test_a_refused_configuration_is_final_unless_the_process_has_run_with_it(
    monkeypatch: pytest.MonkeyPatch, is_configured: bool
) -> None:
    """A port may be free again a moment later."""
    monkeypatch.setattr(child_supervisor.Deaths, "replace_at", 0.0)
    starts = 0

    async def start() -> ChildCommand:
        nonlocal starts
        starts += 1
        # The exit code of bad usage.
        return ChildCommand("router", await asyncio.create_subprocess_exec("sh", "-c", "exit 2"))

    router = ChildSupervisor("router", start, 45.0, is_configured=is_configured)
    await router.start()
    router.supervise()
    async with asyncio.timeout(60):
        error = await router.end()
    assert isinstance(error, ConfigError)
    assert starts == (1 + child_supervisor._MOST_DEATHS if is_configured else 1)
    assert error.message.endswith("and kept ending") is is_configured
    await router.stop()
