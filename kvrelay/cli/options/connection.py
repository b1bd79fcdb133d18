"""Options of the commands that connect to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Name of the model, if the cluster serves several.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="KVRELAY_TOKEN_FILE",
        metavar="FILE",
        help="File that contains only your token.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="KVRELAY_TLS_CA",
        metavar="FILE",
        help="PEM file of the CA to trust; enables TLS.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="KVRELAY_TLS_CERT",
        metavar="FILE",
        help="PEM file of your certificate, if the cluster requires one.",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        envvar="KVRELAY_TLS_KEY",
        metavar="FILE",
        help="PEM file of the key of --tls-cert.",
    ),
]
