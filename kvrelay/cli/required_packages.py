"""Checks that the packages of the `cluster` extra are installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec

import typer

_NEEDED = ("torch", "transformers", "ray", "redis", "pydantic", "yaml", "xxhash", "cryptography")
P = ParamSpec("P")


def requires_cluster_extra(command: Callable[P, None]) -> Callable[P, None]:
    """Wraps a command so that it exits with 2 if a package of `kvrelay[cluster]` is missing."""
    return _requires(command, _NEEDED, "'.[cluster]' in a clone of kvrelay")


def requires_cryptography(command: Callable[P, None]) -> Callable[P, None]:
    """Wraps a command so that it exits with 2 if cryptography is missing. It needs nothing else."""
    return _requires(command, ("cryptography",), "cryptography")


def _requires(
    command: Callable[P, None], needed: tuple[str, ...], install: str
) -> Callable[P, None]:
    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            typer.echo(
                f"kvrelay: this command needs packages that are missing: {', '.join(missing)}; "
                f"run pip install {install}",
                err=True,
            )
            raise typer.Exit(2)
        command(*args, **kwargs)

    return checked
