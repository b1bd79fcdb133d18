"""`kvrelay serve`: a cluster in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay.cli.cluster_extra import requires_cluster_extra

Config = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        envvar="KVRELAY_CONFIG",
        help="YAML file; configs/default.yaml has every key.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_MODEL", help="A folder, a hub id, or demo.", metavar="DIR|HUB_ID|demo"
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_LOG_LEVEL",
        metavar="debug|info|warning|error",
        help="Least level that is logged.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_RAY_ADDRESS",
        metavar="auto|HOST:PORT",
        help="A running Ray cluster, whose nodes the workers are spread over; without it, a Ray "
        "starts here.",
    ),
]

OWN_CLUSTER: dict[str, object] = {
    **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
    "listen.worker_host": "127.0.0.1",
    "security.tls": None,
    "security.tokens_file": None,
}
"""Overrides for a cluster of a command's own, on this machine, beside any other and without its
endpoints.
"""


@requires_cluster_extra
def serve(
    config: Config = None,
    model: Model = None,
    prefill: Annotated[
        int | None, typer.Option(envvar="KVRELAY_PREFILL", help="Prefill workers to start.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(envvar="KVRELAY_DECODE", help="Decode workers to start.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(envvar="KVRELAY_GRPC_PORT", help="0 picks a free one.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(envvar="KVRELAY_HTTP_PORT", help="0 picks a free one.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(envvar="KVRELAY_ADMIN_PORT", help="0 picks a free one.")
    ] = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
) -> None:
    """Run a cluster in the foreground: Redis, Ray, prefill and decode workers, a router.

    Prints one line on stdout when it can serve. Ctrl-C or SIGTERM lets streams finish and exits 0;
    a second one stops at once.

    With --ray-address, on one of the nodes of a Ray cluster, Ray and Redis are those that run
    already, and workers go to all its nodes; redis.url, listen.worker_host and security.tls have to
    be set for that.

    Example: kvrelay serve --model demo --prefill 1 --decode 2
    """
    from kvrelay.config.config_file import load_config
    from kvrelay.launch.ray_address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging

    options = {"model.path": model, "prefill.replicas": prefill, "decode.replicas": decode}
    overrides: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None
    }
    listen = load_config(config, overrides).listen  # a port option keeps the configured host
    for endpoint, port in (("grpc", grpc_port), ("http", http_port), ("admin", admin_port)):
        if port is not None:
            overrides[f"listen.{endpoint}"] = (
                f"{getattr(listen, endpoint).rpartition(':')[0]}:{port}"
            )
    loaded = load_config(config, overrides)
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    set_log_level(log_level)
    configure_logging("warning")
    raise typer.Exit(asyncio.run(_serve(loaded, ray_address)))


def set_log_level(level: str | None) -> None:
    """For this process and those that it starts."""
    from kvrelay.process.telemetry import LEVEL_VARIABLE

    if level is not None:
        os.environ[LEVEL_VARIABLE] = level


async def _serve(config: Any, ray_address: str | None) -> int:
    """Runs until a signal. Returns the exit code."""
    from kvrelay.launch.local_cluster import LocalCluster

    stop = asyncio.Event()
    cluster = LocalCluster(config, ray_address=ray_address)
    signals = 0

    def stop_or_kill() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            cluster.kill()

    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop_or_kill)

    console = Console(stderr=True)
    starting = asyncio.create_task(cluster.__aenter__())
    stopping = asyncio.create_task(stop.wait())
    with console.status(
        f"starting {config.prefill.replicas} prefill and {config.decode.replicas} decode workers"
    ):
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    starting.result()
    print(cluster.endpoints, flush=True)
    failing = asyncio.create_task(cluster.wait())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        return 0
    finally:
        for task in (stopping, failing):
            task.cancel()
        with console.status("draining"):
            await cluster.__aexit__(None, None, None)
