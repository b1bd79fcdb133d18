"""`kvrelay kv-store`: keeps KV blocks in memory, for the workers of several hosts."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from kvrelay.cli.options.cluster import Config, LogLevel
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.serve import set_log_level
from kvrelay.errors import InvalidArgument


@requires_cluster_extra
def kv_store(
    config: Config = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the listener; port 0 picks a free port. An address that is not "
            "loopback needs security.tls in the file of --config.",
        ),
    ] = "127.0.0.1:50061",
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory for blocks, such as 16GiB.",
        ),
    ] = "4GiB",
    tenant_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for blocks of one tenant. Default: all that other tenants leave.",
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run one store of KV blocks, which workers name in kv.tiers with kind remote.

    Prints one line on stdout when the store is ready. Blocks are in memory only and end with the
    process. SIGTERM ends it within seconds.

    Example: kvrelay kv-store --listen 127.0.0.1:50061 --size 16GiB
    """
    import uvloop

    from kvrelay.config.config_file import load_config
    from kvrelay.config.listen import is_address
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.kv_store.block_store import BlockStore
    from kvrelay.kv_store.process import serve
    from kvrelay.planning.quantity import size as in_units
    from kvrelay.process.machine import Machine
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.process.telemetry import configure_logging

    loaded = ClusterConfig() if config is None else load_config(config)
    if not is_address(listen):
        raise InvalidArgument(f"--listen: {listen!r:.80} is not HOST:PORT")
    num_bytes = _bytes("--size", size)
    if num_bytes > (memory := Machine.here().memory_bytes):
        raise InvalidArgument(
            f"--size: {size} is more than this machine's memory of {in_units(memory)}; set less"
        )
    of_tenant = None if tenant_size is None else _bytes("--tenant-size", tenant_size)
    set_log_level(log_level)
    # A line each minute would be in a person's way.
    configure_logging("warning" if sys.stderr.isatty() else "info")

    async def run() -> None:
        stop = StopRequest()
        stop.install()
        blocks = BlockStore(num_bytes, of_tenant)
        await serve(listen, loaded.security, blocks, lambda line: print(line, flush=True), stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    if sys.stderr.isatty():
        print("stopped; its blocks are gone", file=sys.stderr)


def _bytes(option: str, text: str) -> int:
    """Parses a size. Raises InvalidArgument."""
    from kvrelay.config.size import parse_size

    try:
        num_bytes = parse_size(text)
    except ValueError as error:
        raise InvalidArgument(f"{option}: {error}") from None
    if num_bytes < 2**20:
        raise InvalidArgument(f"{option}: {text} is too little for blocks of KV; set 1MiB or more")
    return num_bytes
