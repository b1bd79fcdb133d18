"""What `kvrelay restart` says, status by status."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from support.scripted_router import serving

from kvrelay.cli.main import run
from kvrelay.cli.views.restart_progress import RestartProgress
from kvrelay.errors import Unavailable
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import PendingWorker, WorkerLoad
from kvrelay.wire import cluster as wire


def status(*restarting: str, registry: str = "ok", **states: str) -> wire.ClusterStatus:
    workers = tuple(
        wire.WorkerStatus(name.replace("_", "-"), "decode", 1, state, "127.0.0.1:1", WorkerLoad())  # type: ignore[arg-type]
        for name, state in states.items()
    )
    pools = (wire.PoolStatus("prefill", 0, ()), wire.PoolStatus("decode", 2, workers))
    return wire.ClusterStatus(
        "demo", "ready", pools, (), RouterLoad("r"), 64, 16, registry, restarting
    )


COURSE = (
    status("decode-0", "decode-1", decode_0="ready", decode_1="ready"),
    status("decode-0", "decode-1", decode_0="draining", decode_1="ready", decode_2="ready"),
    status("decode-1", decode_1="draining", decode_2="ready", decode_3="ready"),
    # The worker has ended, and the controller has not noted it yet.
    status("decode-1", decode_2="ready", decode_3="ready"),
    status(decode_2="ready", decode_3="ready"),
)
SAID = [
    "decode-0: waiting until its successor is ready",
    "decode-1: waiting until its successor is ready",
    "decode-0: draining, its successor serves",
    "decode-0: replaced, 1 of 2",
    "decode-1: draining, its successor serves",
    "decode-1: stopped",
    "decode-1: replaced, 2 of 2",
]


def test_each_step_is_told_once() -> None:
    progress = RestartProgress(["decode-0", "decode-1"])
    said = [line for one in COURSE for line in (*progress.news(one), *progress.news(one))]
    assert said == SAID
    assert progress.over
    progress.check()


def test_a_successor_without_room_is_told_with_the_reason() -> None:
    progress = RestartProgress(["decode-0"])
    waiting = status("decode-0", decode_0="ready")
    assert progress.news(waiting) == ["decode-0: waiting until its successor is ready"]
    pending = replace(waiting, pending=(PendingWorker("decode-1", "decode", "no node has a GPU"),))
    assert progress.news(pending) == [
        "decode-0: waiting until its successor is ready, which waits for room: no node has a GPU"
    ]
    assert progress.news(pending) == []


def test_a_registry_that_is_away_has_forgotten_nothing() -> None:
    progress = RestartProgress(["decode-0"])
    for _ in range(20):
        progress.news(status(registry="no answer", decode_0="ready"))
    assert not progress.over


def test_a_request_that_was_lost_is_told() -> None:
    progress = RestartProgress(["decode-0", "decode-1"])
    for _ in range(20):
        progress.news(status("decode-1", decode_0="ready", decode_1="ready"))
        assert not progress.over
    while not progress.over:
        progress.news(status(decode_0="ready"))
    with pytest.raises(Unavailable, match=r"not restarted: decode-0; .* run the command again"):
        progress.check()


class Restarting(wire.ClusterServiceServicer):
    def __init__(self, *course: wire.ClusterStatus) -> None:
        self.course = course
        self.asked: list[list[str]] = []

    async def RestartWorkers(
        self, request: wire.pb.RestartWorkersRequest, context: object
    ) -> object:
        self.asked.append(list(request.names))
        return wire.pb.RestartWorkersResponse(worker_ids=["decode-0", "decode-1"])

    async def WatchStatus(self, request: wire.pb.WatchStatusRequest, context: object) -> object:
        for one in self.course:
            yield wire.cluster_status_to_proto(one)


def test_restart_shows_its_course_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Restarting(*COURSE)
    with serving(cluster) as admin:
        assert run(["restart", "decode", "--admin", admin]) == 0
    assert capsys.readouterr().out.splitlines() == SAID
    assert cluster.asked == [["decode"]]


def test_restart_of_all_that_is_forgotten_fails(capsys: pytest.CaptureFixture[str]) -> None:
    lost = replace(COURSE[0], restarting=())
    with serving(Restarting(*[lost] * 10)) as admin:
        assert run(["restart", "--admin", admin]) == 1
    assert "not restarted: decode-0, decode-1" in capsys.readouterr().err


def test_a_router_that_goes_away_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Restarting(*COURSE[:2])) as admin:
        assert run(["restart", "--admin", admin]) == 1
    said = capsys.readouterr().err
    assert "0 of 2 workers replaced, not yet decode-0, decode-1; the restart continues" in said


def test_ctrl_c_says_what_is_done_and_what_is_left() -> None:
    class Endless(Restarting):
        async def WatchStatus(self, request: wire.pb.WatchStatusRequest, context: object) -> object:
            for one in self.course:
                yield wire.cluster_status_to_proto(one)
            await asyncio.Event().wait()

    with serving(Endless(*COURSE[:3])) as admin:
        restart = subprocess.Popen(
            [sys.executable, "-m", "kvrelay", "restart", "--admin", admin],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert restart.stdout is not None
            assert [restart.stdout.readline().rstrip() for _ in SAID[:5]] == SAID[:5]
            restart.send_signal(signal.SIGINT)
            out, err = restart.communicate(timeout=120)
        finally:
            restart.kill()
            restart.wait()
    assert (restart.returncode, out) == (130, "")
    assert err == (
        "kvrelay: 1 of 2 workers replaced, not yet decode-1; the restart continues in the cluster, "
        "and `kvrelay status` shows its workers\n"
    )
