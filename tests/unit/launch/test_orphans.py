"""Which workers a template kills: those whose actors have ended, and no others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

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
