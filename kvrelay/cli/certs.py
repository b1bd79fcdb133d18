"""`kvrelay certs`: certificates to try TLS out with."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.cluster_extra import requires_cluster_extra


@requires_cluster_extra
def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where they are written; nothing is overwritten.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="DNS name or IP address that clients use; may be given several times.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 365,
) -> None:
    """Make a CA, and certificates of a router, a worker, an operator (admin) and a client.

    Prints the section of the configuration that uses them. Keep ca-key.pem off the cluster: who has
    it can make more. Routers need router.pem and its key, workers worker.pem and its key, all
    ca.pem.

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
