"""Environment variables that are misspelled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from kvrelay.cli.main import app
from kvrelay.cli.variables import VARIABLES, misspelled

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
