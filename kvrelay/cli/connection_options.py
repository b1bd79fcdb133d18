"""Options of the commands that connect to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="KVRELAY_TOKEN_FILE", metavar="FILE", help="Holds your token, alone."
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", envvar="KVRELAY_TLS_CA", metavar="FILE", help="Use TLS and trust this CA (PEM)."
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="KVRELAY_TLS_CERT",
        metavar="FILE",
        help="Your certificate (PEM), if asked for.",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", envvar="KVRELAY_TLS_KEY", metavar="FILE", help="Its key (PEM)."),
]
