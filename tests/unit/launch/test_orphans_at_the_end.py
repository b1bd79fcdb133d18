"""A template process that is told to end forgets none of its workers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from kvrelay.launch.orphans import Orphans

# Runs until it is killed.
_SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize("line", range(1, 13))
def test_sigterm_at_any_line_after_the_end_of_an_actor(line: int) -> None:
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_name != "wait" or "orphans" not in frame.f_code.co_filename:
            return None
        seen += event == "line"
        if seen == line and event == "line":
            signal.raise_signal(signal.SIGTERM)
        return trace

    def end(*_: object) -> None:
        raise SystemExit

    former = signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    actor, worker = subprocess.Popen(_SLEEP), subprocess.Popen(_SLEEP)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            orphans = Orphans(listener.fileno())
            orphans.watch(actor.pid, worker.pid)
            actor.kill()
            actor.wait()
            sys.settrace(trace)
            try:
                with pytest.raises(SystemExit):
                    orphans.wait()
            finally:
                sys.settrace(None)
            orphans.kill_all()
            assert worker.wait(60) == -signal.SIGKILL
    finally:
        for process in (actor, worker):
            process.kill()
            process.wait()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, former)
