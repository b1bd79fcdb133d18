"""`kvrelay version`: the versions of kvrelay and of what it runs on."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import kvrelay
from kvrelay.cli.options.output import AsJson
from kvrelay.process.machine import Machine

_PACKAGES = ("torch", "transformers", "ray", "grpcio", "redis")


def version(
    as_json: AsJson = False,
) -> None:
    """Show the versions of kvrelay, of Python and of the main packages, and this machine.

    Example: kvrelay version --json
    """
    found = {
        "kvrelay": kvrelay.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in _PACKAGES},
        "machine": str(Machine.here()),
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:<13} {value or 'not installed'}")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
