"""Ctrl-C at any moment ends a command quietly, with exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest
from support.prepared import prepared

import kvrelay

ROOT = Path(kvrelay.__file__).parents[1]
# The program sends SIGINT to itself when it imports the module that its first argument names.
PROGRAM = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
from kvrelay.cli.entry import main
main()
"""


def interrupted_at(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        # While the command line itself is imported.
        ("kvrelay.cli.main", ["serve"]),
        ("typer", ["version"]),
        ("rich.console", ["status"]),
        ("kvrelay.cli.loadtest.app", ["--help"]),
        # While a command imports what it needs.
        ("kvrelay.config.config_file", ["serve"]),
        ("pydantic", ["serve"]),
        ("kvrelay.launch.local_cluster", ["demo"]),
        ("grpc", ["generate", "hello"]),
    ],
)
def test_ctrl_c_during_an_import_ends_quietly(module: str, arguments: list[str]) -> None:
    done = interrupted_at(module, *arguments)
    # A command that runs a cluster confirms it.
    said = "kvrelay: stopping\n" if arguments == ["demo"] else ""
    began = "starting Redis, Ray, a prefill worker, a decode worker and a router\n"
    told = done.stderr.removeprefix(began)
    assert (done.returncode, done.stdout, told) == (130, "", said)


def test_a_command_that_ignores_ctrl_c_goes_on() -> None:
    """As a background job of a shell script does."""
    done = subprocess.run(
        prepared(
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
            *(sys.executable, "-c", PROGRAM, "typer", "--version"),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kvrelay ")


def test_the_installed_command_begins_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvrelay": "kvrelay.cli.entry:main"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=lambda one: str(one)
)
def test_a_cluster_that_was_never_ready(name: signal.Signals, code: int, tmp_path: Path) -> None:
    """The signal arrives when the cluster has made its folder, long before the workers serve."""
    ports = [f"--{one}-port=0" for one in ("grpc", "http", "admin")]
    serve = subprocess.Popen(
        [sys.executable, "-m", "kvrelay", "serve", "demo", *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        while not list(tmp_path.glob("kvrelay-cluster-*")) and serve.poll() is None:
            time.sleep(0.02)
        serve.send_signal(name)
        out, err = serve.communicate(timeout=240)
    finally:
        serve.kill()
        serve.wait()
    assert serve.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    assert "kvrelay: stopping; the cluster was not ready yet\n" in err
    assert list(tmp_path.iterdir()) == [], "nothing of the cluster remains"


def test_a_thread_that_a_file_system_blocks_does_not_keep_the_process(tmp_path: Path) -> None:
    """As a stuck network file system does, a pipe without a writer blocks the open of a file."""
    os.mkfifo(tmp_path / "stuck")
    script = f"""
        from kvrelay.cli.main import run
        from kvrelay.launch import local_cluster
        def check(*_, **__):
            print("checking", flush=True)
            open({str(tmp_path / "stuck")!r})
        local_cluster.check_machine = check
        run(["serve", "demo", "--log-level", "error"])
    """
    serve = subprocess.Popen(
        [sys.executable, "-c", dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stdout is not None
        assert serve.stdout.readline() == "checking\n"
        serve.send_signal(signal.SIGTERM)
        _, err = serve.communicate(timeout=60)
    finally:
        serve.kill()
        serve.wait()
    assert (serve.returncode, err) == (0, "kvrelay: stopping; the cluster was not ready yet\n")
