"""`kvrelay certs`: creates a CA and certificates for TLS."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.required_packages import requires_cryptography


@requires_cryptography
def certs(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder for the files; existing files are not overwritten."
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="DNS name or IP address that clients use; repeatable.",
        ),
    ] = None,
    days: Annotated[
        int,
        typer.Option(min=1, max=3650, metavar="N", help="Validity of the certificates, in days."),
    ] = 365,
) -> None:
    """Create a CA and certificates for routers, workers, operators (admin) and clients.

    Prints the section of the configuration that uses them. Routers need router.pem and its key,
    workers need worker.pem and its key, and all need ca.pem. Keep ca-key.pem off the cluster: with
    it, anyone can create further certificates.

    Example: kvrelay certs certs --host inference.example.org --days 90
    """
    from kvrelay.security.authority import write_certificates

    write_certificates(folder, host or (), timedelta(days=days))
    files = folder.absolute()
    print(f"security:\n  tls:\n    ca: {_quoted(files / 'ca.pem')}")
    for role in ("router", "worker"):
        print(f"    {role}:\n      cert: {_quoted(files / f'{role}.pem')}")
        print(f"      key: {_quoted(files / f'{role}-key.pem')}")


def _quoted(path: Path) -> str:
    """Returns a path as a scalar of YAML, of which JSON's strings are a part."""
    return json.dumps(str(path))
