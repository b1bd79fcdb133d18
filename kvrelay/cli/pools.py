"""`kvrelay scale`, `drain` and `restart`: commands that change the pools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.options.connection import ModelName, TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.status import DEFAULT_ADMIN, Admin, admin_client, statuses
from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views.pending_workers import are_known, room_lines, unknown_lines
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.types.workers import POOLS, PoolName

if TYPE_CHECKING:
    from kvrelay.cli.views.restart_progress import RestartProgress
    from kvrelay.client.admin import AdminClient
    from kvrelay.wire.cluster import ClusterStatus

# Most time for the workers that `scale` adds to start, or to find no room.
LOOK_S = 10.0
_POLL_S = 0.25


def scale(
    sizes: Annotated[
        list[str],
        typer.Argument(metavar="POOL=N...", help="Target sizes: prefill=N, decode=N, or both."),
    ],
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    reason: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Why, for the scaling history that `status` shows."),
    ] = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Set the number of workers of one or both pools.

    Prints the new sizes. The command then waits up to 10 s until the new workers start, and warns
    on stderr if some find no room. Those start as soon as there is room. A decode pool has at least
    one worker, unless its policy has `min_replicas: 0`.

    Example: kvrelay scale prefill=2 decode=4 --reason "the launch at noon"
    """
    from kvrelay.client.connection import Connection

    wanted = parse_sizes(sizes)
    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model) as client:
        before = {pool.name: pool.desired for pool in client.status().pools}
        prefill, decode = client.set_pool_size(**wanted, reason=reason)
        print(f"prefill={prefill} decode={decode}", flush=True)
        # In a pool that shrinks, workers of the larger size may still be pending.
        growing: dict[PoolName, int] = {
            pool: size
            for pool, size in (("prefill", prefill), ("decode", decode))
            if pool in wanted and size >= before.get(pool, 0)
        }
        for line in _without_room(client, growing) if growing else ():
            note(line)


def _without_room(client: AdminClient, sizes: Mapping[PoolName, int]) -> list[str]:
    """Waits until each of the wanted workers has started or found no room. Returns a line per pool
    with workers of the second kind.
    """
    from rich.console import Console

    end = time.monotonic() + LOOK_S
    with Console(stderr=True).status("waiting for the workers to start"):
        try:
            while not are_known(status := client.status(), sizes) and time.monotonic() < end:
                time.sleep(_POLL_S)
        except KvRelayError:
            # The sizes are set, whatever happens to this connection.
            return []
    return [*room_lines(status, sizes), *unknown_lines(status, sizes)]


def drain(
    workers: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKER...", help="Names of workers, as `kvrelay status` shows them."
        ),
    ],
    admin: Admin = DEFAULT_ADMIN,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Stop workers after their running requests have finished. A successor of each starts, when
    there is room for it; `kvrelay scale` makes a pool smaller.

    Example: kvrelay drain decode-1
    """
    from kvrelay.client.connection import Connection

    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    alone = [
        worker
        for status in statuses(admin, connection)
        for worker in _without_others(status, workers)
    ]
    with admin_client(admin, connection) as client:
        for worker in workers:
            client.drain(worker)
            print(f"draining {worker}", flush=True)
    for worker in alone:
        note(
            f"no other decode worker is ready, so requests wait until the successor of {worker} "
            f"serves; `kvrelay restart {worker}` starts the successor first"
        )


def _without_others(status: ClusterStatus, leaving: Sequence[str]) -> list[str]:
    """Returns the ready decode workers, if all of them leave."""
    for pool in status.pools:
        if pool.name == "decode":
            ready = [one.worker_id for one in pool.workers if one.state == "ready"]
            return ready if set(ready) <= set(leaving) else []
    return []


def restart(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[prefill|decode|standby|WORKER]...",
            help="Pools or workers to restart. Default: all workers.",
        ),
    ] = None,
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Replace workers one at a time in each pool, without failing a request. Each worker is stopped
    when its successor is ready.

    Each pool needs the resources of one more worker. Prints the progress; Ctrl-C ends the output,
    and the restart continues.

    Example: kvrelay restart decode
    """
    from kvrelay.cli.views.restart_progress import RestartProgress
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model) as client:
        restarting = client.restart(*(names or ()))
        if not restarting:
            note("there is no such worker to restart")
        progress = RestartProgress(restarting)
        try:
            for status in client.watch(0.5):
                for line in progress.news(status):
                    print(line, flush=True)
                if progress.over:
                    break
            else:
                raise Unavailable(f"{admin} closed the connection; {_goes_on(progress)}")
        except KeyboardInterrupt:
            note(_goes_on(progress))
            raise
    progress.check()


def _goes_on(progress: RestartProgress) -> str:
    """Says how far a restart is that this command does not watch any more."""
    return (
        f"{progress.summary}; the restart continues in the cluster, and `kvrelay status` shows its "
        "workers"
    )


def parse_sizes(texts: Sequence[str]) -> dict[PoolName, int]:
    """Returns {"prefill": 2} for ["prefill=2"]. Raises typer.BadParameter."""
    sizes: dict[PoolName, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        pool = next((one for one in POOLS if one == name), None)
        # The router knows the largest size; here it is what fits the message.
        if pool is None or not number.isdecimal() or len(number) > 9:
            raise typer.BadParameter(
                f"{text[:40]!r} is not a pool size; give prefill=N or decode=N with a whole number "
                "N."
            )
        if pool in sizes:
            raise typer.BadParameter(f"{pool} is given twice; give each pool once.")
        sizes[pool] = int(number)
    return sizes
