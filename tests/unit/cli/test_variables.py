"""Environment variables that are misspelled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import typer
from support.scripted_router import ScriptedRouter, serving

from kvrelay.cli.main import app, run
from kvrelay.cli.options.variables import VARIABLES, misspelled
from kvrelay.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvRelayError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unimplemented,
)

# Not those of options.
OF_PROCESSES = {"KVRELAY_KERNELS", "KVRELAY_REASON_FILE"}


def options(command: Any, prefix: str = "KVRELAY") -> Iterator[tuple[str | None, str]]:
    """Yields the variable of each option that has one of its own, and the one derived from the
    command's name.
    """
    for param in command.params:
        if param.param_type_name == "option" and not param.is_eager:
            yield param.envvar, f"{prefix}_{param.name.upper()}"
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{prefix}_{name.upper().replace('-', '_')}")


def commands_with_numbers(
    command: Any, path: tuple[str, ...] = (), prefix: str = "KVRELAY"
) -> Iterator[tuple[list[str], Any, str]]:
    """Yields each command with one option whose value is a number, and the derived variable."""
    kinds = get_type_hints(command.callback) if command.callback else {}
    for param in command.params:
        is_number = kinds.get(param.name) in (int, float, int | None, float | None)
        if param.param_type_name == "option" and is_number:
            yield list(path), param, f"{prefix}_{param.name.upper()}"
            break
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_with_numbers(
            below, (*path, name), f"{prefix}_{name.upper().replace('-', '_')}"
        )


FOUND = list(options(typer.main.get_command(app)))


def test_the_variables_are_those_of_the_commands() -> None:
    assert {own for own, _ in FOUND if own} | OF_PROCESSES == VARIABLES


def test_no_variable_that_has_an_effect_counts_as_misspelled() -> None:
    assert len(FOUND) > 200
    assert not list(misspelled(name for own, derived in FOUND for name in (own or derived,)))


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_a_missing_letter_is_noticed(name: str) -> None:
    wrong = name[:-2] + name[-1]
    assert list(misspelled([wrong, name, "PATH"])) == [
        f"the variable {wrong} has no effect; did you mean {name}?"
    ]


@pytest.mark.parametrize("name", ["PORT", "SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8000_TCP"])
def test_what_kubernetes_sets_is_no_mistake(name: str) -> None:
    assert not list(misspelled([f"KVRELAY_{name}", f"KVRELAY_ROUTER_{name}"]))


def test_a_command_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay", "version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KVRELAY_PREFIL": "2"},
    )
    said = "kvrelay: the variable KVRELAY_PREFIL has no effect; did you mean KVRELAY_PREFILL?\n"
    assert done.stderr == said


NUMBERS = [
    (path, param.opts[0], param.envvar or derived)
    for path, param, derived in commands_with_numbers(typer.main.get_command(app))
]


@pytest.mark.parametrize(("path", "option", "variable"), NUMBERS)
def test_a_bad_value_of_a_variable_names_it(
    path: list[str],
    option: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "no-number")
    assert run(path) == 2
    said = capsys.readouterr().err
    # Arguments that are missing may be told first.
    if option in said:
        assert f"; {variable} sets {option}: " in said
        assert f" or run `unset {variable}`; see " in said
    monkeypatch.delenv(variable)
    assert run([*path, option, "no-number"]) == 2
    assert "unset" not in capsys.readouterr().err


def test_an_error_after_parsing_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_TARGET", "127.0.0.1:1")
    assert run(["generate", "hi"]) == 1
    assert capsys.readouterr().err.endswith(
        "; KVRELAY_TARGET sets --target: give --target on the command line, or run `unset "
        "KVRELAY_TARGET`\n"
    )
    assert run(["generate", "hi", "--target", "127.0.0.1:2"]) == 1
    assert "unset" not in capsys.readouterr().err


def test_an_error_about_the_request_does_not_blame_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = InvalidArgument("max_tokens is 0; allowed is 1", field="max_tokens")
    with serving(ScriptedRouter([refusal])) as target:
        monkeypatch.setenv("KVRELAY_TARGET", target)
        assert run(["generate", "hi"]) == 2
    assert capsys.readouterr().err == f"kvrelay: {target}: max_tokens is 0; allowed is 1\n"
    monkeypatch.setenv("KVRELAY_TARGET", "here")
    assert run(["generate", "hi"]) == 2
    assert "unset KVRELAY_TARGET" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [NotFound, PermissionDenied, FailedPrecondition, Unimplemented, Unauthenticated]
)
def test_what_a_server_answers_does_not_blame_the_address(
    error: type[KvRelayError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(ScriptedRouter([error("not for you")])) as target:
        monkeypatch.setenv("KVRELAY_TARGET", target)
        assert run(["generate", "hi"]) == 1
    said = capsys.readouterr().err
    assert "not for you" in said
    assert "unset" not in said


def test_an_option_before_its_subcommand_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["loadtest", "--rate", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No such option: --rate; it belongs to kvrelay loadtest run; see kvrelay" in said


@pytest.mark.parametrize(
    ("path", "option", "meant"),
    [
        ("status", "--target", "--admin"),
        ("adapters list", "--target", "--admin"),
        ("generate", "--admin", "--target"),
        ("chat", "--http-port", "--target"),
    ],
)
def test_an_option_of_another_command_is_told(
    path: str, option: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*path.split(), option, "127.0.0.1:1"]) == 2
    assert f"No such option: {option}; give the " in (said := capsys.readouterr().err)
    assert f"with {meant} HOST:PORT" in said
