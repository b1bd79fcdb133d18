"""What `kvrelay serve` shows on a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from kvrelay.cli.main import run
from kvrelay.cli.terminal import serve_screen
from kvrelay.cli.terminal.notes import wrapped
from kvrelay.cli.terminal.serve_screen import (
    _QUESTION,
    KERNELS,
    _with_model,
    new_log_file,
    next_steps,
    own_command,
    progress_line,
    ready_line,
    removed_if_empty,
    report_changes,
)
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.endpoints import Endpoints
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.models import resolve_model
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.workers import EndedWorker

USUAL = Endpoints("127.0.0.1:50051", "http://127.0.0.1:8000", "127.0.0.1:50052")
OTHERS = Endpoints("127.0.0.1:7001", "http://127.0.0.1:7002", "127.0.0.1:7003")
LOG = Path("/home/me/.local/state/kvrelay/logs/serve-x.log")


def commands(text: str) -> list[list[str]]:
    """As a shell reads them: an escaped end of a line is none."""
    lines = text.replace("\\\n", "").splitlines()
    return [shlex.split(one) for one in lines if one.startswith("kvrelay ")]


@pytest.mark.parametrize("endpoints", [USUAL, OTHERS])
def test_the_commands_reach_this_cluster(endpoints: Endpoints) -> None:
    config = ClusterConfig()
    text = next_steps(config, endpoints, LOG)
    assert f"{endpoints.http}/v1/chat/completions" in text
    assert str(LOG) in text
    generate, status = commands(text)
    assert ("--target" in generate) == ("--admin" in status) == (endpoints is OTHERS)
    if endpoints is OTHERS:
        assert generate[generate.index("--target") + 1] == endpoints.grpc
        assert status[status.index("--admin") + 1] == endpoints.admin


def test_the_prompt_takes_both_pools() -> None:
    """By the defaults of the configuration, with the bundled model."""
    generate, _ = commands(next_steps(ClusterConfig(), USUAL, LOG))
    tokens = Tokenizer.load(resolve_model("demo")).encode(generate[-1])
    assert len(tokens) > ClusterConfig().router.local_below_tokens


def test_nothing_is_wider_than_a_usual_terminal() -> None:
    """A terminal breaks longer lines in the middle of a word."""
    text = next_steps(ClusterConfig(), USUAL, LOG)
    assert max(map(len, text.splitlines())) <= 80
    # A model of several.
    body = _with_model(_QUESTION, "organisation/Model-of-8B-Instruct")
    lines = f"    -d {shlex.quote(body)}".splitlines()
    assert max(map(len, lines)) <= 80
    assert json.loads(body)["model"] == "organisation/Model-of-8B-Instruct"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_the_status_page_has_an_address_that_a_certificate_may_name(host: str) -> None:
    everywhere = replace(USUAL, http=f"https://{host}:8000")
    assert "Status page   https://localhost:8000/\n" in next_steps(ClusterConfig(), everywhere, LOG)


def test_a_notice_is_indented_below_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    lines = wrapped("12:00:00  " + "word " * 9, out, 10).splitlines()
    assert [line[:10] for line in lines] == ["12:00:00  ", *[" " * 10] * (len(lines) - 1)]
    assert max(map(len, lines)) <= 30


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_shell_reads_the_commands_as_they_are_meant(shell: str) -> None:
    """Also where exclamation marks have a meaning, as bash on a terminal has it."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    text = next_steps(ClusterConfig(), USUAL, LOG)
    history = "set -o history -o histexpand\n" if shell == "bash" else ""
    function = "kvrelay() { for word; do printf '%s\\0' \"$word\"; done; }\n"
    started = text[text.index("kvrelay generate") : text.index("The same cluster")]
    done = subprocess.run(
        [shell],
        input=history + function + started,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    words = done.stdout.split("\0")[:-1]
    assert words == commands(text)[0][1:]
    assert Tokenizer.load(resolve_model("demo")).encode(words[-1])


def test_a_cluster_with_tokens_shows_no_command_that_it_would_refuse() -> None:
    config = ClusterConfig.model_validate({"security": {"tokens_file": "tokens.yaml"}})
    text = next_steps(config, USUAL, LOG)
    assert commands(text) == []
    assert "security.md" in text


def test_what_it_looks_at_for_the_compiler_are_the_kernels() -> None:
    assert all(list(folder.glob("*.cpp")) for folder in KERNELS)


def test_progress_names_each_worker() -> None:
    assert progress_line({}) == "starting Redis, Ray and workers"
    line = progress_line({"prefill-0": "ready", "decode-0": "starting"})
    assert line == "starting workers: decode-0 starting, prefill-0 ready"
    many = {f"decode-{number}": "waits for room" for number in range(98)} | {"prefill-0": "ready"}
    assert progress_line(many) == "starting workers: 1 ready, 98 waits for room"
    assert "compiling kernels" in progress_line({"decode-0": "starting"}, compiles=True)


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "demo", "--model", "other"]) == 2
    assert "MODEL is demo and --model is other" in capsys.readouterr().err


def test_the_command_is_as_the_user_called_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "kvrelay"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o700)
    monkeypatch.setattr(sys, "argv", [str(installed)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command() == [str(installed)]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_command() == ["kvrelay"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/kvrelay/__main__.py"])
    assert own_command() == [sys.executable, "-m", "kvrelay"]


def test_the_last_logs_of_a_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "kvrelay" / "logs"
    folder.mkdir(parents=True)
    old = [folder / f"serve-20200101-0000{second}-x.log" for second in range(10, 40)]
    for file in (*old, folder / "notes.txt"):
        file.touch()
    log = new_log_file()
    assert log.parent == folder
    assert sorted(folder.glob("*.log")) == [*old[-19:], log]
    assert (folder / "notes.txt").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(log))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert new_log_file().parent == tmp_path


def test_a_start_in_a_burst_keeps_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of one second are in no order."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for _ in range(60):
        log = new_log_file()
        assert log.exists()
    assert len(list(log.parent.iterdir())) == 20
    log.unlink()
    assert removed_if_empty(log)


def test_a_full_disk_keeps_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, room = tmp_path / "full", tmp_path / "room"
    room.mkdir()
    allocate = os.posix_fallocate

    def fallocate(file: int, offset: int, size: int) -> None:
        if str(full) in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setenv("XDG_STATE_HOME", str(full))
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    log = new_log_file()
    assert log.parent == room
    assert log.stat().st_size == 0
    assert not list(full.rglob("*.log"))


def test_it_fits_a_usual_terminal_with_the_ready_line() -> None:
    """The cursor takes a line of the 24 too."""
    line = ready_line(USUAL)
    assert line == "kvrelay ready grpc=127.0.0.1:50051 http=127.0.0.1:8000 admin=127.0.0.1:50052"
    assert len(line) <= 80
    assert len([line, *next_steps(ClusterConfig(), USUAL, LOG).splitlines()]) < 24


class Watched:
    """A cluster with these states of its workers, poll by poll; then `report_changes` ends."""

    controller_deaths = 0
    router_deaths = 0

    def __init__(self, *states: dict[str, str] | None) -> None:
        self.states = list(states)

    async def worker_states(self) -> dict[str, str] | None:
        if not self.states:
            raise EOFError
        return self.states.pop(0)

    async def ended_workers(self) -> dict[str, EndedWorker]:
        return {"decode-0": EndedWorker("decode-0", "its process ended", drained=False)}


async def test_the_loss_of_all_workers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and no outage of Redis is taken for it."""
    monkeypatch.setattr(serve_screen, "_WATCH_S", 0)
    file = io.StringIO()
    cluster = Watched({"decode-0": "ready"}, None, {}, {"decode-1": "ready"})
    with pytest.raises(EOFError):
        await report_changes(cast(LocalCluster, cluster), Console(file=file, width=80))
    assert [line[10:] for line in file.getvalue().splitlines()] == [
        "decode-0 has died: its process ended; the log has more",
        "a new worker starts; no worker serves, so requests wait",
        "decode-1 serves",
    ]


async def test_the_end_of_a_router_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_screen, "_WATCH_S", 0)
    file = io.StringIO()
    cluster = Watched(*[{"decode-0": "ready"}] * 3)
    cluster.router_deaths = 1
    with pytest.raises(EOFError):
        await report_changes(cast(LocalCluster, cluster), Console(file=file, width=80))
    assert [line[10:] for line in file.getvalue().splitlines()] == [
        "the router has ended, and its streams with it; it starts again"
    ]
