"""`kvrelay scale`, `drain` and `restart`: the operator's hand on the pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kvrelay.cli.connection_options import TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.status import DEFAULT_ADMIN, Admin, admin_client
from kvrelay.errors import Unavailable
from kvrelay.types import POOLS, PoolName


def scale(
    sizes: Annotated[
        list[str], typer.Argument(metavar="POOL=N...", help="prefill=N, decode=N, or both.")
    ],
    admin: Admin = DEFAULT_ADMIN,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Set how many workers the pools should have.

    Example: kvrelay scale prefill=2 decode=4
    """
    from kvrelay.client.connection import Connection

    wanted = parse_sizes(sizes)
    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key)) as client:
        prefill, decode = client.set_pool_size(**wanted)
    print(f"prefill={prefill} decode={decode}")


def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as `kvrelay status` shows it.")],
    admin: Admin = DEFAULT_ADMIN,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Let a worker finish what it holds, then stop it.

    Example: kvrelay drain decode-1
    """
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key)) as client:
        client.drain(worker)
    print(f"draining {worker}")


def restart(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[prefill|decode|standby|WORKER]...", help="Left out: all workers."),
    ] = None,
    admin: Admin = DEFAULT_ADMIN,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Replace workers without losing a request: one at a time in each pool, and only when its
    successor is ready.

    Needs room for one more worker in each pool. Shows how far it is; Ctrl-C ends the show, and the
    restart goes on.

    Example: kvrelay restart decode
    """
    from kvrelay.cli.views.restart_progress import RestartProgress
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key)) as client:
        progress = RestartProgress(client.restart(*(names or ())))
        for status in client.watch(0.5):
            for line in progress.news(status):
                print(line, flush=True)
            if progress.over:
                break
        else:
            raise Unavailable(
                f"{admin} tells no more; the restart goes on, and `kvrelay status` "
                f"shows how far it is"
            )
    progress.check()


def parse_sizes(texts: Sequence[str]) -> dict[PoolName, int]:
    """{"prefill": 2} from ["prefill=2"]; raises typer.BadParameter."""
    sizes: dict[PoolName, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        pool = next((one for one in POOLS if one == name), None)
        if pool is None or not number.isdecimal():
            raise typer.BadParameter(
                f"{text!r} is not one of prefill=N, decode=N with N a whole number."
            )
        if pool in sizes:
            raise typer.BadParameter(f"{pool} is given twice.")
        sizes[pool] = int(number)
    return sizes
