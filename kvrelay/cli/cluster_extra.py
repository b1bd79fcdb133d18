"""Commands that need more than the client's packages say so in one line."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec

import typer

_NEEDED = ("torch", "transformers", "ray", "redis", "pydantic", "yaml", "xxhash", "cryptography")
P = ParamSpec("P")


def requires_cluster_extra(command: Callable[P, None]) -> Callable[P, None]:
    """Exits with 2 when a package of `kvrelay[cluster]` is missing."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            typer.echo(
                f"kvrelay: this command runs a cluster and needs {', '.join(missing)}: pip install "
                f"'kvrelay[cluster]'",
                err=True,
            )
            raise typer.Exit(2)
        command(*args, **kwargs)

    return checked
