"""Which workers a template kills: those whose actors have ended, and no others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from kvrelay.launch import orphans
from kvrelay.launch.orphans import Orphans


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is frozen."""
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """An actor has connected to it, so that no wait lasts."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        yield server


def test_the_worker_of_an_actor_that_had_ended_already_is_killed(
    worker: subprocess.Popen[bytes], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "KILL_S", 0.0)
    with subprocess.Popen(["true"]) as actor:
        actor.wait()
    watched = Orphans(listener.fileno())
    watched.watch(actor.pid, worker.pid)
    watched.wait()
    assert worker.wait(30) == -signal.SIGKILL


def test_the_worker_of_an_actor_that_ends_is_killed_when_its_time_is_over(
    worker: subprocess.Popen[bytes], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Orphans(listener.fileno())
    with subprocess.Popen(["sleep", "600"]) as actor:
        watched.watch(actor.pid, worker.pid)
        watched.wait()
        actor.kill()
    watched.wait()  # it sees the end, and its time begins
    watched.wait()
    assert worker.poll() is None
    (ended_at, _), *_ = watched._left
    later = ended_at + 0.001
    monkeypatch.setattr(orphans.time, "monotonic", lambda: later)
    watched.wait()
    monkeypatch.undo()
    assert worker.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("actor", [0, os.getpid()], ids=["of another namespace", "alive"])
def test_the_worker_of_an_actor_that_may_be_alive_is_left_alone(
    worker: subprocess.Popen[bytes],
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    actor: int,
) -> None:
    """Process 0 stands for an actor of another namespace."""
    monkeypatch.setattr(orphans, "KILL_S", 0.0)
    watched = Orphans(listener.fileno())
    watched.watch(actor, worker.pid)
    watched.wait()
    watched.kill_all()
    assert worker.poll() is None


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
    actor, worker = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"])
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
