"""Ended workers are reaped and their signals logged, whoever reads the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from textwrap import dedent

import pytest

WORKERS = 40
# Prints the children that are left after a burst of ends.
SCRIPT = f"""
    import os, select, signal
    from kvrelay.launch.reaper import Reaper
    from kvrelay.process.telemetry import configure_logging
    configure_logging(at_once=True)
    reaper = Reaper()
    def child():
        pid = os.fork()
        if not pid:
            reaper.close()
            signal.pause()
        return pid
    left = {{child() for _ in range({WORKERS})}}
    ends = os.fork()
    if not ends:
        os._exit(0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    def children():
        with open(f"/proc/self/task/{{os.getpid()}}/children") as file:
            return file.read().split()
    poll = select.poll()
    poll.register(reaper.fileno(), select.POLLIN)
    while children():
        poll.poll()
        reaper.reap()
    print(*sorted(left))
"""


def run(stderr: int, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", dedent(script)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
        timeout=120,
    )


def test_each_killed_worker_of_a_burst_is_logged() -> None:
    done = run(subprocess.PIPE)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert sorted(line["pid"] for line in lines) == [int(pid) for pid in done.stdout.split()]
    assert len(lines) == WORKERS
    assert {(line["event"], line["signal"]) for line in lines} == {("worker_killed", "SIGKILL")}


@pytest.mark.parametrize("state", ["closed", "full"])
def test_a_log_that_nobody_reads_stops_no_reaping(state: str) -> None:
    reads, writes = os.pipe()
    if state == "closed":
        os.close(reads)
    else:
        os.set_blocking(writes, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writes, b"x")
        os.set_blocking(writes, True)
    try:
        assert len(run(writes).stdout.split()) == WORKERS
    finally:
        os.close(writes)
        if state == "full":
            os.close(reads)


def test_a_closed_reaper_leaves_signals_as_they_were() -> None:
    script = """
        import os, signal
        from kvrelay.launch.reaper import Reaper
        reaper = Reaper()
        number = reaper.fileno()
        reaper.close()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        try:
            os.fstat(number)
        except OSError:
            print("closed")
    """
    assert run(subprocess.PIPE, script).stdout == "closed\n"
