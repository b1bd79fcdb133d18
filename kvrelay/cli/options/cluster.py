"""The options of the commands that start a cluster, or say how it would start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.config.schema import ClusterConfig

Config = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        envvar="KVRELAY_CONFIG",
        metavar="FILE",
        help="YAML configuration file; configs/default.yaml shows every key.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_MODEL",
        help="Model folder, Hugging Face hub id, or demo. If the file of --config has several "
        "models: the name of the only one to serve.",
        metavar="MODEL",
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
]
Prefill = Annotated[
    int | None,
    typer.Option(
        envvar="KVRELAY_PREFILL", metavar="N", help="Prefill workers to start. Default: 1."
    ),
]
Decode = Annotated[
    int | None,
    typer.Option(envvar="KVRELAY_DECODE", metavar="N", help="Decode workers to start. Default: 1."),
]


def _port_option(name: str, default: int) -> Any:
    return typer.Option(
        envvar=f"KVRELAY_{name.upper()}_PORT",
        metavar="PORT",
        help=f"{name} port; 0 picks a free port. Default: {default}.",
    )


GrpcPort = Annotated[int | None, _port_option("gRPC", 50051)]
HttpPort = Annotated[int | None, _port_option("HTTP", 8000)]
AdminPort = Annotated[int | None, _port_option("Admin", 50052)]
LogLevel = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_LOG_LEVEL",
        metavar="LEVEL",
        help="Lowest level to log: debug, info, warning or error.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_RAY_ADDRESS",
        metavar="HOST:PORT",
        help="Running Ray cluster for the workers, or auto to find it. Default: start Ray on this "
        "machine.",
    ),
]

OWN_CLUSTER: dict[str, object] = {
    **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
    "listen.worker_host": "127.0.0.1",
    "security.tls": None,
    "security.tokens_file": None,
}
"""Overrides for a cluster that a command starts for itself on this machine. Its ports differ from
those of any other cluster.
"""


def effective_config(
    file: Path | None,
    *,
    argument: str | None,
    model: str | None,
    prefill: int | None,
    decode: int | None,
    grpc_port: int | None,
    http_port: int | None,
    admin_port: int | None,
) -> ClusterConfig:
    """Returns the configuration of the file with the values of the command line.

    `argument` and `model` both name the model. Raises ConfigError, and typer.BadParameter for two
    models.
    """
    from kvrelay.config.config_file import load_config

    if argument is not None and model is not None and argument != model:
        raise typer.BadParameter(f"MODEL is {argument} and --model is {model}; give one of them.")
    options = {
        "model.path": argument or model,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
    }
    overrides: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None
    }
    listen = load_config(file, overrides).listen  # a port option keeps the configured host
    for endpoint, port in (("grpc", grpc_port), ("http", http_port), ("admin", admin_port)):
        if port is not None:
            if not 0 <= port <= 65535:
                raise ConfigError(f"--{endpoint}-port {port} is not a port; allowed are 0 to 65535")
            host = getattr(listen, endpoint).rpartition(":")[0]
            overrides[f"listen.{endpoint}"] = f"{host}:{port}"
    return load_config(file, overrides)
