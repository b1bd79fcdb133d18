"""Command lines as files of the project state them, parsed by the programs that they name."""

from __future__ import annotations

from typing import Any

import click
import typer
import typer.main
from ray.scripts.scripts import cli as ray_cli

from kvrelay.cli.main import app

KVRELAY: Any = typer.main.get_command(app)
BAD_USAGE: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)


def resolve(arguments: list[str]) -> None:
    """Parses a command line as the program would. Raises for an unknown command or option, or a bad
    value.
    """
    command, *rest = arguments
    group = {"kvrelay": KVRELAY, "ray": ray_cli}[command]
    while isinstance(group, click.Group) or hasattr(group, "commands"):
        name, *rest = rest
        group = group.commands[name]
    group.make_context(group.name, list(rest))
