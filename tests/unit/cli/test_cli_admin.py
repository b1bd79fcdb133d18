from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.scripted_router import serving

from kvrelay.cli import pools
from kvrelay.cli.main import run
from kvrelay.cli.views.pending_workers import pending_lines, span
from kvrelay.cli.views.render import status_view
from kvrelay.errors import NotFound
from kvrelay.types.control_plane import ControllerInfo, RouterLoad, ScalingDecision
from kvrelay.types.workers import PendingWorker, TierLoad, WorkerLoad
from kvrelay.wire import cluster as wire
from kvrelay.wire.status import abort

Output = pytest.CaptureFixture[str]

GOOD = WorkerLoad(
    draft_tokens=400,
    accepted_tokens=300,
    running=3,
    waiting=2,
    blocks_total=200,
    blocks_held=50,
    tokens_per_second=12.34,
    weight_bytes=3 * 2**30,
    kv_bytes=512,
    rss_bytes=1300 * 2**20,
    tiers=(
        TierLoad(
            "disk",
            size_bytes=20 * 2**30,
            used_bytes=3 * 2**30,
            blocks=1234,
            hits=77,
            errors=2,
            error="No space left on device",
        ),
    ),
)
STATUS = wire.ClusterStatus(
    model="demo",
    state="ready",
    pools=(
        wire.PoolStatus(
            "prefill",
            1,
            (
                wire.WorkerStatus(
                    "prefill-[red]0", "prefill", 7, "ready", "127.0.0.1:1", GOOD, 1234567
                ),
            ),
        ),
        wire.PoolStatus(
            "decode",
            2,
            (
                wire.WorkerStatus(
                    "decode-0",
                    "decode",
                    8,
                    "draining",
                    "127.0.0.1:2",
                    WorkerLoad(integrity_ok=False, integrity_error="2 blocks lost"),
                    unfit="slow, 9.8 times as slow as the median of the pool's others",
                    tensor_parallel=2,
                    engine="native kernels, weights int8, KV bfloat16",
                ),
            ),
        ),
    ),
    decisions=(ScalingDecision(1_700_000_000.0, "decode", 1, 2, "queue_depth 9 over 4"),),
    router=RouterLoad("router-0", running=5, waiting=1, finished=40, failed=2),
    block_bytes=1024,
    block_size=16,
    registry="ok",
    restarting=("decode-0",),
    pending=(PendingWorker("decode-1", "decode", "no Ray node has room for CPU 1"),),
    controllers=(ControllerInfo("host-1-aa", "leading", 3), ControllerInfo("host-2-bb", "standby")),
    routing="kv_aware",
    autoscaling="queue-depth.yaml",
)


class ScriptedCluster(wire.ClusterServiceServicer):
    def __init__(self) -> None:
        self.sizes = {"prefill": 1, "decode": 2}
        self.drained: list[str] = []
        self.left = threading.Event()
        self.status = self.watched = STATUS

    async def GetStatus(
        self, request: wire.pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ClusterStatus:
        return wire.cluster_status_to_proto(self.status)

    async def WatchStatus(
        self, request: wire.pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[wire.pb.ClusterStatus]:
        assert request.interval_seconds == 0.5
        try:
            yield wire.cluster_status_to_proto(self.watched)
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def SetPoolSize(
        self, request: wire.pb.SetPoolSizeRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.SetPoolSizeResponse:
        self.sizes |= {
            name: getattr(request, name) for name in self.sizes if request.HasField(name)
        }
        return wire.pb.SetPoolSizeResponse(**self.sizes)

    async def DrainWorker(
        self, request: wire.pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.DrainWorkerResponse:
        if request.worker_id != "decode-0":
            await abort(context, NotFound(f"no worker {request.worker_id}"))
        self.drained.append(request.worker_id)
        return wire.pb.DrainWorkerResponse()


def test_a_program_that_reads_status_gets_unbroken_lines(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    cluster = GrowingCluster(2)
    cluster.statuses, cluster.reason = 2, "no Ray node has room: " + "10.0.0.1 has none, " * 9
    with serving(cluster) as admin:
        assert run(["status", "--admin", admin]) == 0
    lines = capsys.readouterr().out.splitlines()
    (pending,) = (line for line in lines if " are pending" in line)
    assert pending.endswith(cluster.reason)
    assert max(len(line) for line in lines if line != pending) <= 100


def test_status_shows_all(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with serving(ScriptedCluster()) as admin:
        assert run(["status", "--admin", admin]) == 0
    shown = capsys.readouterr().out
    for words in (
        "demo: ready",
        "prefill 1 of 1",
        "decode 1 of 2",
        "registry ok",
        "40 finished",
        "2 failed",
        "waiting for restart: decode-0",
        "decode-1 is pending: no Ray node has room for CPU 1",
        "controllers: host-1-aa leading, host-2-bb standby",
        "engine of decode-0: native kernels, weights int8, KV bfloat16\n",
        "routing: kv_aware; autoscaling: queue-depth.yaml\n",
    ):
        assert words in shown
    good = next(line for line in shown.splitlines() if "prefill-" in line)
    cells = [cell.strip() for cell in good.strip("│").split("│")]
    assert cells == [
        "prefill",
        "prefill-[red]0",
        "7",
        "ready",
        "1234567",
        "3",
        "2",
        "25%",
        "12.3",
        "3 GiB",
        "512 B",
        "1.27 GiB",
        "ok",
    ]
    assert "tensor parallelism: decode-0 2" in shown
    assert "speculation: 300 of 400 draft tokens accepted (75%)" in shown
    assert "BROKEN: 2 blocks lost" in shown
    assert "decode-0 gets no new work: slow, 9.8 times as slow" in shown
    (tier,) = [line for line in shown.splitlines() if "No space left on device" in line]
    assert [cell.strip() for cell in tier.strip("│").split("│")][:6] == [
        "prefill-[red]0",
        "disk",
        "3 GiB",
        "20 GiB",
        "1234",
        "77",
    ]
    assert "1 → 2" in shown
    assert "queue_depth 9 over 4" in shown


def test_status_names_hosts_where_there_are_several() -> None:
    def shown(*addresses: str) -> list[str]:
        pools = [
            replace(pool, workers=tuple(replace(one, address=address) for one in pool.workers))
            for pool, address in zip(STATUS.pools, addresses, strict=True)
        ]
        out = io.StringIO()
        Console(file=out, width=160, markup=False).print(
            status_view(replace(STATUS, pools=tuple(pools)))
        )
        return out.getvalue().splitlines()

    assert not any(" host " in line for line in shown("10.0.0.1:1", "10.0.0.1:2"))
    lines = shown("10.0.0.1:1", "[fd00::2]:1")
    assert any(" host " in line for line in lines)
    for worker, host in (("prefill-", "10.0.0.1"), ("decode-0", "[fd00::2]")):
        assert any(worker in line and f" {host} " in line for line in lines)


def test_status_fits_a_narrow_terminal() -> None:
    (first, *others), *rest = [pool.workers for pool in STATUS.pools]
    broken = replace(
        first, load=replace(first.load, integrity_ok=False, integrity_error="2 blocks are lost")
    )
    pools = [
        replace(pool, workers=workers)
        for pool, workers in zip(STATUS.pools, [(broken, *others), *rest], strict=True)
    ]
    out = io.StringIO()
    Console(file=out, width=80, markup=False).print(
        status_view(replace(STATUS, pools=tuple(pools)), 80)
    )
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for worker in (worker for pool in STATUS.pools for worker in pool.workers):
        (line,) = [
            one for one in text.splitlines() if one.split()[:2] == [worker.worker_id, worker.state]
        ]
        assert line.split()[2] == str(worker.pid or "-")
    assert f"{first.worker_id} BROKEN: 2 blocks are lost" in text
    assert f"{first.worker_id} disk: 3 GiB of 20 GiB, 77 hits; 2 errors, the last: No" in text


def test_status_shows_the_pool_of_a_standby_that_took_a_place_and_counts_the_workers_to_start() -> (
    None
):
    prefill, decode = STATUS.pools
    (worker,) = decode.workers
    decode = replace(decode, desired=5, workers=(replace(worker, worker_id="standby-0"),))
    out = io.StringIO()
    Console(file=out, width=80).print(status_view(replace(STATUS, pools=(prefill, decode)), 80))
    assert "prefill 1 of 1, decode 1 of 5 (3 to start)" in out.getvalue()
    assert " standby-0 (decode) " in out.getvalue()


def test_status_fits_40_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=40, markup=False).print(status_view(STATUS, 40))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "…" not in out.getvalue()
    rows = [line.split() for line in lines]
    assert ["worker", "state", "run", "wait", "KV", "held"] in rows
    assert ["prefill-[red", "ready", "3", "2", "25%"] in rows, "a long name has two lines"
    assert ["decode-0", "draining", "0", "0", "-"] in rows
    assert any("decode 1 → 2: queue_depth 9" in line for line in lines)


@pytest.mark.parametrize(("columns", "most"), [(None, 100), ("80", 80), ("", 100), ("0", 100)])
def test_status_in_a_pipe_has_the_columns_that_are_wanted(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, columns: str | None, most: int
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    with serving(ScriptedCluster()) as admin:
        assert run(["status", "--admin", admin]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= most
    assert "1234567" in shown
    assert "…" not in shown


def test_status_says_that_no_policy_has_decided() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(status_view(replace(STATUS, decisions=()), 80))
    assert out.getvalue().endswith("No scaling decision yet.\n")


def test_status_says_what_a_delay_holds_back() -> None:
    out = io.StringIO()
    held = ScalingDecision(1.0, "prefill", 1, 4, "queue_depth 8, not yet for upscale_delay_s 5")
    Console(file=out, width=80).print(status_view(replace(STATUS, delayed=(held,)), 80))
    assert out.getvalue().splitlines()[-1] == (
        "delayed: prefill 1 → 4: queue_depth 8, not yet for upscale_delay_s 5"
    )


SQL = wire.pb.Adapter(name="sql", path="/a/sql", adapter_id="0123456789", served=True, workers=2)


class SeveralModels(ScriptedCluster):
    """Two models, the second with an adapter."""

    def __init__(self, *adapters: wire.pb.Adapter) -> None:
        super().__init__()
        self.adapters = adapters

    async def GetStatus(
        self, request: wire.pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ClusterStatus:
        return wire.cluster_status_to_proto(replace(STATUS, models=("demo", "large")))

    async def ListAdapters(
        self, request: wire.pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ListAdaptersResponse:
        return wire.pb.ListAdaptersResponse(
            adapters=self.adapters if request.model in ("", "large") else ()
        )


@pytest.mark.parametrize("tells", [True, False])
def test_adapters_of_all_models_are_listed_or_those_of_one(capsys: Output, tells: bool) -> None:
    """Whether or not the router tells the model of an adapter."""
    adapter = wire.pb.Adapter()
    adapter.CopyFrom(SQL)
    adapter.model = "large" if tells else ""
    with serving(SeveralModels(adapter)) as admin:
        assert run(["adapters", "list", "--admin", admin]) == 0
        assert run(["adapters", "list", "--admin", admin, "--model", "large"]) == 0
        assert run(["adapters", "list", "--admin", admin, "--model", "demo"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        head = ["model", "adapter", "state", "workers", "from", "id", "folder"]
        line = ["large", "sql", "served", "2", "command", "01234567", "/a/sql"]
        none = [
            "no",
            "adapters;",
            "`kvrelay",
            "adapters",
            "load",
            "NAME",
            "FOLDER`",
            "loads",
            "one",
        ]
        assert rows == [head, line, head, line, none]
        assert run(["adapters", "list", "--json", "--admin", admin]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["model"], found["name"], found["workers"]) == ("large", "sql", 2)


def test_the_list_says_why_an_adapter_is_refused(capsys: Output) -> None:
    adapter = wire.pb.Adapter()
    adapter.CopyFrom(SQL)
    adapter.MergeFrom(wire.pb.Adapter(model="large", refused="decode-0 refuses it: [/a] is gone"))
    adapter.workers = 0
    with serving(SeveralModels(adapter)) as admin:
        assert run(["adapters", "list", "--admin", admin]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[:4] == ["large", "sql", "refused", "0"]
    assert rows[2] == "sql: decode-0 refuses it: [/a] is gone"


def test_status_as_json(capsys: Output) -> None:
    with serving(ScriptedCluster()) as admin:
        assert run(["status", "--json", "--admin", admin]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [pool["name"] for pool in status["pools"]] == ["prefill", "decode"]
    assert status["pools"][0]["workers"][0]["load"]["tokens_per_second"] == 12.34
    assert status["decisions"][0]["reason"] == "queue_depth 9 over 4"


def test_scale_sets_what_is_named_and_leaves_the_rest(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LOOK_S", 0.0)
    cluster = ScriptedCluster()
    with serving(cluster) as admin:
        assert run(["scale", "decode=5", "--admin", admin]) == 0
        assert run(["scale", "prefill=0", "decode=3", "--admin", admin]) == 0
    assert capsys.readouterr().out == "prefill=1 decode=5\nprefill=0 decode=3\n"
    assert cluster.sizes == {"prefill": 0, "decode": 3}


class GrowingCluster(ScriptedCluster):
    """Its workers are pending from the third status on."""

    def __init__(self, pending: int) -> None:
        super().__init__()
        self._pending, self.statuses = pending, 0
        self.reason = "no Ray node has room for CPU 1"

    async def GetStatus(
        self, request: wire.pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ClusterStatus:
        self.statuses += 1
        count = self._pending if self.statuses > 2 else 0
        # Not in the order of their numbers, as Redis returns them.
        pending = [
            PendingWorker(f"decode-{number}", "decode", self.reason)
            for number in sorted(range(1, count + 1), key=str)
        ]
        return wire.cluster_status_to_proto(replace(STATUS, pending=tuple(pending)))


def test_scale_says_how_many_workers_have_no_room(capsys: Output) -> None:
    cluster = GrowingCluster(98)
    with serving(cluster) as admin:
        assert run(["scale", "decode=99", "--admin", admin]) == 0
        assert run(["status", "--admin", admin]) == 0
    assert cluster.statuses == 4, "it waits until the workers are known"
    out, err = capsys.readouterr()
    assert out.startswith("prefill=1 decode=99\n")
    assert err == (
        "kvrelay: decode: there is room for 1 of 99 workers, and 98 wait for it: no Ray node has "
        "room for CPU 1; set decode=1, or add a node to the Ray cluster\n"
    )
    assert "decode-1 … decode-98 are pending, 98 workers: no Ray node" in out
    assert out.count("pending") == 1


def test_scale_says_that_very_many_workers_are_not_known_yet(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cli.pools.LOOK_S", 0.1)
    with serving(GrowingCluster(0)) as admin:
        assert run(["scale", "decode=99", "--admin", admin]) == 0
    assert capsys.readouterr().err == (
        "kvrelay: decode: 1 of 99 workers have started so far; `kvrelay status` shows the others\n"
    )


def test_scale_beyond_the_room_is_told_before_all_workers_are_known(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cli.pools.LOOK_S", 0.1)
    cluster = GrowingCluster(98)
    cluster.statuses = 2
    with serving(cluster) as admin:
        assert run(["scale", "decode=1000", "--admin", admin]) == 0
    assert capsys.readouterr().err == (
        "kvrelay: decode: 1 of 1000 workers have started so far, and 98 wait for room: no Ray node "
        "has room for CPU 1; `kvrelay status` shows the others\n"
    )


def test_scale_down_ignores_workers_that_were_pending_before(capsys: Output) -> None:
    cluster = GrowingCluster(98)
    cluster.statuses = 2
    with serving(cluster) as admin:
        assert run(["scale", "decode=1", "--admin", admin]) == 0
    assert capsys.readouterr() == ("prefill=1 decode=1\n", "")


def test_scale_within_the_room_says_nothing_more(capsys: Output) -> None:
    with serving(GrowingCluster(0)) as admin:
        assert run(["scale", "prefill=1", "--admin", admin]) == 0
    assert capsys.readouterr() == ("prefill=1 decode=2\n", "")


NAMES = st.lists(st.integers(0, 10**20), min_size=1, max_size=9, unique=True)


@given(numbers=NAMES, data=st.data())
def test_a_span_names_the_lowest_and_the_highest_number(numbers: list[int], data: Any) -> None:
    shown = span(data.draw(st.permutations([f"decode-{number % 10**18}" for number in numbers])))
    ordered = sorted(number % 10**18 for number in numbers)
    assert re.findall(r"\d+", shown)[0] == str(ordered[0])
    assert re.findall(r"\d+", shown)[-1] == str(ordered[-1])


@given(
    st.lists(
        st.builds(
            PendingWorker,
            st.text(max_size=12),
            st.sampled_from(["prefill", "decode", "standby"]),
            st.text(max_size=3),
        ),
        max_size=40,
    )
)
def test_any_number_of_pending_workers_is_a_line_per_pool(pending: list[PendingWorker]) -> None:
    assert len(list(pending_lines(pending))) == len({one.pool for one in pending})


@pytest.mark.parametrize(
    "size",
    [
        *("decode", "decode=", "decode=-1", "decode=1.5", "both=2", "=2"),
        *("decode=99999999999", "decode=" + "9" * 5000),
    ],
)
def test_a_bad_size_is_bad_usage(capsys: Output, size: str) -> None:
    assert run(["scale", "--", size]) == 2
    assert "prefill=N" in capsys.readouterr().err


def test_a_pool_twice_is_bad_usage(capsys: Output) -> None:
    assert run(["scale", "decode=1", "decode=2"]) == 2
    assert "decode is given twice" in capsys.readouterr().err


def test_drain(capsys: Output) -> None:
    cluster = ScriptedCluster()
    with serving(cluster) as admin:
        assert run(["drain", "decode-0", "--admin", admin]) == 0
        assert run(["drain", "decode-9", "--admin", admin]) == 1
    assert cluster.drained == ["decode-0"]
    out, err = capsys.readouterr()
    assert out == "draining decode-0\n"
    assert err.splitlines()[-1] == f"kvrelay: {admin}: no worker decode-9"


def test_a_drain_of_the_last_decode_worker_names_the_way_without_a_wait(capsys: Output) -> None:
    cluster = ScriptedCluster()
    prefill, decode = STATUS.pools
    (worker,) = decode.workers
    ready = replace(decode, workers=(replace(worker, state="ready"),))
    cluster.status = replace(STATUS, pools=(prefill, ready))
    with serving(cluster) as admin:
        assert run(["drain", "decode-0", "--admin", admin]) == 0
    out, err = capsys.readouterr()
    assert out == "draining decode-0\n"
    assert "no other decode worker is ready" in " ".join(err.split())
    assert "`kvrelay restart decode-0` starts the successor first" in " ".join(err.split())


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=1"], ["drain", "w"]])
def test_nobody_there_is_one_line(capsys: Output, command: list[str]) -> None:
    with serving(ScriptedCluster()) as admin:
        pass
    assert run([*command, "--admin", admin]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"kvrelay: {admin}: cannot connect: Connection refused. Nothing listens there; start a "
        f"cluster"
    )
    assert len(said.splitlines()) == 1


def test_top_needs_a_terminal(capsys: Output) -> None:
    assert run(["top"]) == 2
    assert "not a terminal" in capsys.readouterr().err


@pytest.mark.parametrize("ends", ["Ctrl-C", "q"])
def test_top_shows_the_cluster_until_it_is_ended(ends: str) -> None:
    cluster = ScriptedCluster()
    cluster.watched = replace(STATUS, models=("demo", "large"))
    ours, theirs = pty.openpty()
    with serving(cluster) as admin, ExitStack() as stack:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from kvrelay.cli.main import main; main()",
                "top",
                "--interval",
                "0.5",
                "--admin",
                admin,
            ],
            stdin=theirs if ends == "q" else subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        before = termios.tcgetattr(ours)
        os.close(theirs)
        shown = b""
        while f"{ends}: quit   --model NAME: another model".encode() not in shown:
            shown += os.read(ours, 65536)
        assert b"queue_depth 9 over 4" in shown
        if ends == "q":
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        assert cluster.left.wait(120)
        _, err = process.communicate(timeout=120)
    assert termios.tcgetattr(ours) == before, "the terminal is as it was"
    os.close(ours)
    assert process.returncode == 0
    assert err == b""
