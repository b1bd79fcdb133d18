from __future__ import annotations

import subprocess
import sys

import pytest
import typer

import kvrelay
from kvrelay.cli.main import app, run

Output = pytest.CaptureFixture[str]
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_version(capsys: Output) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvrelay {kvrelay.__version__}\n"


def test_no_command_shows_the_help(capsys: Output) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: Output, command: str) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: kvrelay {command}" in capsys.readouterr().out


def test_the_command_line_starts_without_heavy_packages() -> None:
    code = (
        "import sys; from kvrelay.cli.main import run; assert run(['--version']) == 0;heavy = "
        "{'torch', 'ray', 'redis', 'numpy', 'yaml', 'transformers', 'grpc'} & "
        "set(sys.modules);assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
