from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.prepared import prepared

import kvrelay
from kvrelay.cli.main import app, run

Output = pytest.CaptureFixture[str]
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
ALL_COMMANDS: list[tuple[str, ...]] = [()]


def _below(command: Any, words: tuple[str, ...]) -> None:
    for name, inner in getattr(command, "commands", {}).items():
        ALL_COMMANDS.append((*words, name))
        _below(inner, (*words, name))


_below(typer.main.get_command(app), ())


def test_version(capsys: Output) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvrelay {kvrelay.__version__}\n"


def test_no_command_shows_the_help(capsys: Output) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)
    assert "Measure a cluster under load. Commands: run, sweep, report, compare." in shown
    assert "KVRELAY_" not in shown, "no option of this page has a variable"


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("router -c /dev/null", ("redis.url is embedded", "set redis.url to redis://HOST:PORT/DB")),
        ("controller -c /dev/null", ("redis.url is embedded", "or run `kvrelay serve`")),
        ("generate hi --tls-ca {junk}", ("--tls-ca {junk} contains no PEM certificate", "CA")),
        ("kv-store --size little", ("--size", "is not a size", "MiB")),
        ("kv-store --size 1000TiB", ("--size", "more than this machine's memory of", "set less")),
        ("kv-store --size 12", ("--size", "too little", "1MiB or more")),
        ("kv-store --listen nowhere", ("--listen", "is not HOST:PORT")),
        ("kv-store --listen 10.1.2.3:0", ("--listen", "not a loopback", "security.tls")),
        ("serve --log-level nope", ("--log-level", "'nope'", "debug, info, warning, error")),
        ("serve --http-port 99999", ("--http-port 99999 is not a port", "0 to 65535")),
        ("loadtest compare a.json", ("Missing argument 'SECOND'",)),
        ("generate hi --target h:99999", ("'h:99999' is not a target", "1 to 65535")),
        ("serve --decode 99999", ("--decode", "must be at most 1024, not 99999")),
        ("loadtest run --rate nan", ("--rate 'nan'", "rates must be 0 or more")),
        ("serve --nonsense", ("--nonsense", "; see kvrelay serve --help")),
        ("loadtest", ("Missing command; give run, sweep, report or compare; see kvrelay load",)),
        ("adapters", ("Missing command; give list, load or unload; see kvrelay adapters --help",)),
        ("token", ("Missing command; give new; see kvrelay token --help",)),
        ("generat", ("No such command 'generat'. Did you mean 'generate'? See kvrelay --help",)),
        ("loadtest run --json", ("requires an argument; see kvrelay loadtest run --help",)),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(
    arguments: str, words: tuple[str, ...], tmp_path: Path, capsys: Output
) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    assert run([one.format(junk=junk) for one in arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word.format(junk=junk) in line


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (("-m", "kvrelay"), "Usage: kvrelay"),
        (("scripts/prebuild_kernels.py",), "usage: prebuild_kernels.py"),
        (("scripts/generate_stubs.py",), "usage: generate_stubs.py"),
        (("scripts/train_demo.py",), "usage: train_demo.py"),
    ],
)
def test_programs_print_their_help_and_do_nothing_else(
    program: tuple[str, ...], words: str
) -> None:
    root = Path(kvrelay.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *program, "--help"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert words in done.stdout


@pytest.mark.sweep(4)
@pytest.mark.parametrize("width", [120, 80, 40])
@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_is_whole_on_a_terminal_of_any_width(
    capsys: Output, words: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown, "nothing is cut"
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    for param in command.params:
        is_shown = param.param_type_name == "option" and not param.hidden
        for option in param.opts if is_shown else ():
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), option
    assert "[env var" not in shown
    for kind in ("<str>", "<int>", "<bool>", "<path>", "<list", "<float>"):
        assert kind not in shown
    assert shown.startswith("Usage: kvrelay")
    assert "x>=" not in shown
    assert "<=x" not in shown
    # An argument of the usage is explained, and no other is there.
    usage = " ".join(shown.partition("\n\n")[0].split()).split(" ")[2 + len(words) :]
    for word in set(usage) - {"COMMAND", "[OPTIONS]"}:
        name = word if word.endswith("]...") else word.strip("[]")
        assert f"\n  {name}\n" in shown.partition("Arguments:")[2], name


def test_the_help_names_the_variables_of_the_options(capsys: Output) -> None:
    assert run(["generate", "--help"]) == 0
    last = " ".join(capsys.readouterr().out.rpartition("Options as variables: ")[2].split())
    names = last.split(", ")
    assert {"KVRELAY_TARGET", "KVRELAY_GENERATE_MAX_TOKENS", "KVRELAY_TLS_KEY"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("kvrelay gene", "generate"),
        ("kvrelay loadtest sw", "sweep"),
        ("kvrelay serve --de", "--decode"),
    ],
)
def test_shells_complete_commands_and_options(typed: str, wanted: str) -> None:
    environment = {
        **os.environ,
        "_KVRELAY_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    found = subprocess.run(
        [sys.executable, "-m", "kvrelay"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.split() == [wanted]


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvrelay", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr == "kvrelay: the output: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("command", ["version", "--help"])
def test_streams_that_are_closed_are_no_error(command: str, closed: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m kvrelay {command} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["version", "plan --help", "serve --help"])
def test_a_pipe_that_nobody_reads_is_no_error(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvrelay", *command.split()],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.stderr == ""
    assert done.returncode in (0, 1), "not that of Python for a failed flush"


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})"
    done = subprocess.run(
        prepared(program, sys.executable, "-m", "kvrelay.cli.main", "version"),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 1
    assert "kvrelay: the current folder does not exist any more" in done.stderr


@pytest.mark.sweep(6)
@pytest.mark.parametrize("encoding", ["ascii", "latin1"])
@pytest.mark.parametrize("columns", ["20", "60"])
def test_a_terminal_without_unicode_shows_what_it_can(encoding: str, columns: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay", "check", *("--grpc-port", "0"), "--http-port", "0"],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": columns, "PYTHONUTF8": "0"},
    )
    assert b"Traceback" not in done.stderr
    assert b"This machine" in done.stdout
