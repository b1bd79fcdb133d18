"""The supervision of a child process: a machine that cannot start a process now may do so later."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from structlog.testing import capture_logs

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
