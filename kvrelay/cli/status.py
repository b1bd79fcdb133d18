"""`kvrelay status` and `kvrelay top`: show the state of a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.options.connection import ModelName, TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.options.output import AsJson
from kvrelay.cli.views import render
from kvrelay.errors import KvRelayError, Unavailable

if TYPE_CHECKING:
    from kvrelay.client.admin import AdminClient
    from kvrelay.client.connection import Connection
    from kvrelay.wire.cluster import ClusterStatus

Admin = Annotated[
    str,
    typer.Option(
        envvar="KVRELAY_ADMIN", metavar="HOST:PORT", help="Admin listener of the cluster."
    ),
]
DEFAULT_ADMIN = "127.0.0.1:50052"


def status(
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    as_json: AsJson = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show pools, workers and the last scaling decisions of all models, or of one.

    The JSON is an object, or a list of objects for several models.

    Example: kvrelay status --admin 127.0.0.1:50052 --json
    """
    from kvrelay.client.connection import Connection

    found = statuses(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model)
    if as_json:
        documents = [asdict(one) for one in found]
        print(json.dumps(documents[0] if len(found) == 1 else documents, indent=2))
        return
    # Programs read lines as they are: without a terminal or COLUMNS, none is broken.
    console = render.console(render.UNBROKEN)
    width = render.STATUS_WIDTH if console.width == render.UNBROKEN else console.width
    for place, now in enumerate(found):
        console.print(*([""] if place else []), render.status_view(now, width), sep="\n")


def top(
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Interval between updates.")
    ] = 1.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show pools, workers, KV held, latencies and scaling decisions live, until q or Ctrl-C.

    Shows one model: the first, or that of --model. While the router is unreachable, the last known
    state is shown and marked as such.

    Example: kvrelay top --interval 0.5
    """
    from rich.live import Live

    from kvrelay.cli.terminal.quit_key import quit_key
    from kvrelay.cli.views.top_view import full_screen, top_view
    from kvrelay.client.connection import Connection

    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    console = render.console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise typer.BadParameter(
            "the output is not a terminal that can be redrawn; use kvrelay status."
        )
    try:
        with quit_key() as key, Live(console=console, screen=True, auto_refresh=False) as live:
            for now, trouble in looks(admin, interval, connection, model):
                # The last line has the hint.
                view = top_view(now, trouble, console.width, console.height - 1)
                others = "   --model NAME: another model" if len(now.models) > 1 else ""
                live.update(full_screen(view, f"{key}: quit{others}"), refresh=True)
    except KeyboardInterrupt:
        return


def statuses(admin: str, connection: Connection, model: str = "") -> list[ClusterStatus]:
    """Returns the status of the model, or without a name of all models."""
    with admin_client(admin, connection, model) as client:
        found = [client.status()]
    for name in () if model else found[0].models[1:]:
        with admin_client(admin, connection, name) as client:
            found.append(client.status())
    return found


def admin_client(admin: str, connection: Connection, model: str = "") -> AdminClient:
    """Returns a client of the admin listener, for one model. Raises InvalidArgument for bad
    credentials.
    """
    from kvrelay.client.admin import AdminClient

    return AdminClient(admin, token=connection.token(), tls=connection.tls(), model=model)


def looks(
    admin: str, interval: float, connection: Connection, model: str = ""
) -> Iterator[tuple[ClusterStatus, str]]:
    """Yields the last known status without end, each with the reason why it is not current, or "".
    Raises Unavailable if the first call fails.
    """
    known: ClusterStatus | None = None
    while True:
        try:
            with admin_client(admin, connection, model) as client:
                for known in client.watch(interval):
                    yield known, ""
            trouble = f"{admin}: the router is shutting down"
        except KvRelayError as error:
            if known is None:
                raise
            trouble = error.message
        if known is None:
            raise Unavailable(trouble)
        yield known, trouble
        time.sleep(interval)
