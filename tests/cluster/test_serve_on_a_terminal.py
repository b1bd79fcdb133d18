"""`kvrelay serve` on a terminal: progress and next steps instead of a log."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.process.telemetry import LEVEL_VARIABLE

pytestmark = pytest.mark.timeout(300)
KVRELAY = [sys.executable, "-m", "kvrelay.cli.main"]
FREE_PORTS = ["--grpc-port", "0", "--http-port", "0", "--admin-port", "0"]
LAST_STEP = "kvrelay status"


def read_to(terminal: int, text: str) -> str:
    """What the terminal shows, up to the end of the line with `text`."""
    shown = b""
    while not re.search(re.escape(text.encode()) + rb".*\n", shown):
        part = os.read(terminal, 4096)
        assert part, shown.decode()
        shown += part
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n")


@pytest.mark.long
def test_the_printed_commands_work_and_the_log_is_in_a_file(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != LEVEL_VARIABLE}
    environment |= {"COLUMNS": "80", "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)}
    command = [*KVRELAY, "serve", "demo", *FREE_PORTS]
    serve = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    try:
        shown = read_to(terminal, LAST_STEP)
        assert "starting Redis, Ray and workers" in shown, "progress"
        assert "event=" not in shown
        assert re.search(r"^kvrelay ready grpc=\S+\s+http=\S+\s+admin=\S+$", shown, re.MULTILINE)
        log = re.search(r"^Log +(\S+)$", shown, re.MULTILINE)
        assert log is not None
        assert "worker_starting" in Path(log[1]).read_text()
        generate, status = (
            shlex.split(one)[3:]
            # An escaped end of a line is none.
            for one in re.sub(r"\\\n+", "", shown).splitlines()
            # As this test calls it.
            if one.startswith(f"{sys.executable} -m kvrelay ")
        )
        answer = subprocess.run(
            [*KVRELAY, *generate], capture_output=True, text=True, timeout=120, check=True
        )
        assert "disaggregated" in answer.stderr
        seen = subprocess.run(
            [*KVRELAY, *status], capture_output=True, text=True, timeout=120, check=True
        )
        assert "prefill-0" in seen.stdout
        described = subprocess.run(
            [*KVRELAY, *status, "--json"], capture_output=True, text=True, timeout=120, check=True
        )
        workers = [one for pool in json.loads(described.stdout)["pools"] for one in pool["workers"]]
        (pid,) = (one["pid"] for one in workers if one["worker_id"] == "decode-0")
        os.kill(pid, signal.SIGKILL)
        gone = r"\d\d:\d\d:\d\d  decode-0 has died: its process ended; the log has more"
        assert re.search(gone, read_to(terminal, "has died"))
        assert re.search(r"decode-\d+ serves", read_to(terminal, "serves"))
        serve.send_signal(signal.SIGINT)
        assert "the log is in" in read_to(terminal, "the log is in")
        assert serve.wait(120) == 0
        assert Path(log[1]).parent == tmp_path / "kvrelay" / "logs"
    finally:
        serve.kill()
        serve.wait()
        os.close(terminal)
