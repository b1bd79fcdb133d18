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

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            typer.echo(
                f"kvrelay: this command needs packages that are missing: {', '.join(missing)}; "
                "run pip install '.[cluster]' in a clone of kvrelay",
                err=True,
            )
            raise typer.Exit(2)
        command(*args, **kwargs)

    return checked
