"""`kvrelay certs`: creates a CA and certificates for TLS."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.cluster_extra import requires_cluster_extra


@requires_cluster_extra
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
    import yaml

    from kvrelay.security.authority import write_certificates

    write_certificates(folder, host or (), timedelta(days=days))
    pairs = {
        role: {
            "cert": str(folder.absolute() / f"{role}.pem"),
            "key": str(folder.absolute() / f"{role}-key.pem"),
        }
        for role in ("router", "worker")
    }
    section = {"security": {"tls": {"ca": str(folder.absolute() / "ca.pem"), **pairs}}}
    print(yaml.safe_dump(section, sort_keys=False, width=1000), end="")
