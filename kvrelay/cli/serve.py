"""`kvrelay serve`: a cluster in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.entry import INTERRUPTED
from kvrelay.errors import ConfigError, InvalidArgument

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
        help="Model folder, Hugging Face hub id, or demo.",
        metavar="MODEL",
    ),
]
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


@requires_cluster_extra
def serve(
    path: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ] = None,
    config: Config = None,
    model: Model = None,
    prefill: Annotated[
        int | None,
        typer.Option(
            envvar="KVRELAY_PREFILL", metavar="N", help="Prefill workers to start. Default: 1."
        ),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(
            envvar="KVRELAY_DECODE", metavar="N", help="Decode workers to start. Default: 1."
        ),
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            envvar="KVRELAY_GRPC_PORT",
            metavar="PORT",
            help="gRPC port; 0 picks a free port. Default: 50051.",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            envvar="KVRELAY_HTTP_PORT",
            metavar="PORT",
            help="HTTP port; 0 picks a free port. Default: 8000.",
        ),
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(
            envvar="KVRELAY_ADMIN_PORT",
            metavar="PORT",
            help="Admin port; 0 picks a free port. Default: 50052.",
        ),
    ] = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
) -> None:
    """Run a cluster in the foreground: Redis, Ray, prefill and decode workers, and a router.

    Prints one line on stdout when the cluster is ready. The first Ctrl-C or SIGTERM lets streams
    finish and exits with 0; the second stops at once. Ctrl-C before the cluster is ready exits with
    130. On a terminal, the log goes to a file unless --log-level is given.

    With --ray-address, run the command on a node of that Ray cluster. The workers are placed on all
    its nodes. Set redis.url, listen.worker_host and security.tls.

    Example: kvrelay serve demo --prefill 1 --decode 2
    """
    from kvrelay.config.config_file import load_config
    from kvrelay.launch.ray_address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging

    if path is not None and model is not None and path != model:
        raise typer.BadParameter(f"MODEL is {path} and --model is {model}; give one of them.")
    options = {"model.path": path or model, "prefill.replicas": prefill, "decode.replicas": decode}
    overrides: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None
    }
    listen = load_config(config, overrides).listen  # a port option keeps the configured host
    for endpoint, port in (("grpc", grpc_port), ("http", http_port), ("admin", admin_port)):
        if port is not None:
            if not 0 <= port <= 65535:
                raise ConfigError(f"--{endpoint}-port {port} is not a port; allowed are 0 to 65535")
            overrides[f"listen.{endpoint}"] = (
                f"{getattr(listen, endpoint).rpartition(':')[0]}:{port}"
            )
    loaded = load_config(config, overrides)
    on_screen = sys.stderr.isatty() and log_level is None
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    set_log_level(log_level)
    configure_logging("warning" if on_screen else "info")
    raise typer.Exit(asyncio.run(_serve(loaded, ray_address, on_screen)))


def set_log_level(level: str | None) -> None:
    """Sets the log level of this process and of the processes that it starts. Raises
    InvalidArgument for an unknown level.
    """
    from kvrelay.process.telemetry import LEVEL_VARIABLE, LEVELS

    if level is None:
        return
    if level.lower() not in LEVELS:
        raise InvalidArgument(
            f"--log-level or {LEVEL_VARIABLE} is {level!r:.40}; allowed are {', '.join(LEVELS)}",
            field="log_level",
        )
    os.environ[LEVEL_VARIABLE] = level


def require_shared_redis(url: str, command: str) -> None:
    """Raises ConfigError for an embedded Redis, which no other process can use."""
    if url == "embedded":
        raise ConfigError(
            f"redis.url is embedded, and `kvrelay {command}` needs the Redis of a running cluster; "
            "set redis.url to redis://HOST:PORT/DB in the file of --config, or run `kvrelay "
            "serve`, which starts a Redis itself"
        )


async def _serve(config: Any, ray_address: str | None, on_screen: bool) -> int:
    """Runs until a signal. Returns the exit code. on_screen: shows progress and next steps, and
    writes the log to a file.
    """
    from kvrelay.cli.serve_screen import (
        new_log_file,
        print_next_steps,
        report_changes,
        show_progress,
    )
    from kvrelay.launch.local_cluster import LocalCluster
    from kvrelay.process.telemetry import log_to_file

    stop = asyncio.Event()
    log_path = new_log_file() if on_screen else None
    if log_path is not None:
        # What this process logs itself.
        log_to_file(log_path)
    cluster = LocalCluster(config, log_path=log_path, ray_address=ray_address)
    signals: list[signal.Signals] = []

    def on_signal(name: signal.Signals) -> None:
        signals.append(name)
        stop.set()
        if len(signals) == 2:
            cluster.halt()
        elif len(signals) > 2:
            cluster.kill()

    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, on_signal, name)

    console = Console(stderr=True)
    starting = asyncio.create_task(cluster.__aenter__())
    stopping = asyncio.create_task(stop.wait())
    with console.status("starting") if on_screen else nullcontext() as status:
        watch = [] if status is None else [asyncio.create_task(show_progress(cluster, status))]
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for one in watch:
            one.cancel()
        await asyncio.gather(*watch, return_exceptions=True)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return INTERRUPTED if signals[0] is signal.SIGINT else 0
    starting.result()
    print(cluster.endpoints, flush=True)
    if log_path is not None:
        print_next_steps(console, config, cluster.endpoints, log_path)
    reporting = asyncio.create_task(report_changes(cluster, console)) if on_screen else None
    failing = asyncio.create_task(cluster.wait())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        return 0
    finally:
        for task in (stopping, failing, reporting):
            if task is not None:
                task.cancel()
        with console.status("draining") if on_screen else nullcontext():
            await cluster.__aexit__(None, None, None)
