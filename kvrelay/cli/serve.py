"""`kvrelay serve`: a cluster in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from kvrelay.cli.entry import INTERRUPTED
from kvrelay.cli.options.cluster import (
    AdminPort,
    Config,
    Decode,
    GrpcPort,
    HttpPort,
    LogLevel,
    Model,
    ModelArgument,
    Prefill,
    RayAddress,
    effective_config,
)
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.notes import note, wrapped
from kvrelay.errors import ConfigError, InvalidArgument


@requires_cluster_extra
def serve(
    path: ModelArgument = None,
    config: Config = None,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
) -> None:
    """Run a cluster in the foreground: Redis, Ray, prefill and decode workers, and a router.

    Prints one line on stdout when the cluster is ready. The first Ctrl-C, SIGTERM or SIGHUP lets
    streams finish and exits with 0; the second stops at once. Ctrl-C before the cluster is ready
    exits with 130. On a terminal, the log goes to a file unless --log-level is given.

    With --ray-address, run the command on a node of that Ray cluster. The workers are placed on all
    its nodes. Set redis.url, listen.worker_host and security.tls.

    Example: kvrelay serve demo --prefill 1 --decode 2
    """
    from kvrelay.launch.ray.address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging
    from router.process import end_now

    loaded = effective_config(
        config,
        argument=path,
        model=model,
        prefill=prefill,
        decode=decode,
        grpc_port=grpc_port,
        http_port=http_port,
        admin_port=admin_port,
    )
    on_screen = sys.stderr.isatty() and log_level is None
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    set_log_level(log_level)
    configure_logging("warning" if on_screen else "info")
    with asyncio.Runner() as runner:
        code = runner.run(_serve(loaded, ray_address, on_screen))
        # A thread may wait for a file system that does not answer.
        end_now(code)


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
    from kvrelay.cli.terminal.serve_screen import (
        new_log_file,
        print_next_steps,
        ready_line,
        removed_if_empty,
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

    # A closed terminal sends SIGHUP, which nohup ignores.
    closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for name in (signal.SIGINT, signal.SIGTERM, *closed):
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
        note("stopping; the cluster was not ready yet")
        with console.status("stopping") if on_screen else nullcontext():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        if log_path is not None:
            log_path.unlink(missing_ok=True)
        return INTERRUPTED if signals[0] is signal.SIGINT else 0
    if (refusal := starting.exception()) is not None:
        if log_path is not None and not removed_if_empty(log_path):
            refusal.add_note(f"The log is in {log_path}")
        raise refusal
    line = ready_line(cluster.endpoints) if sys.stdout.isatty() else str(cluster.endpoints)
    print(wrapped(line, sys.stdout), flush=True)
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
        if log_path is not None:
            note(f"stopped; the log is in {log_path}")
