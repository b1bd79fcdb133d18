"""`kvrelay adapters`: loads, unloads and lists LoRA adapters."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.options.connection import ModelName, TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.options.output import AsJson
from kvrelay.cli.status import DEFAULT_ADMIN, Admin, admin_client
from kvrelay.cli.terminal.help_page import App
from kvrelay.cli.views import render

if TYPE_CHECKING:
    from kvrelay.client.connection import Connection
    from kvrelay.wire.adapters import AdapterStatus

app = App(
    help="Load, unload and list LoRA adapters.",
    epilog="Example: kvrelay adapters load sql ./sql-lora",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Model name of the adapter in requests.")]


@app.command("list")
def list_adapters(
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    as_json: AsJson = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show the adapters of all models, or of one, with the number of workers that have loaded them.

    Example: kvrelay adapters list --json
    """
    from kvrelay.client.connection import Connection

    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    with admin_client(admin, connection, model) as client:
        found = list(client.adapters())
        # A router of an earlier release does not say which model an adapter belongs to.
        if not all(one.model for one in found):
            found = [
                replace(one, model=name)
                for name in ((model,) if model else client.status().models or ("",))
                for one in _adapters_of(admin, connection, name)
            ]
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    if not found:
        print("no adapters; `kvrelay adapters load NAME FOLDER` loads one")
        return
    from rich.table import Table

    # Programs read lines as they are.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("model", "adapter", "state", "workers", "from", "id", "folder"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(
            one.model,
            one.name,
            _state(one),
            str(one.workers),
            "configuration" if one.configured else "command",
            one.adapter_id[:8],
            one.path,
        )
    console = render.console(render.UNBROKEN)
    console.print(table)
    for one in found:
        if one.refused:
            console.print(f"{one.name}: {one.refused}", markup=False, highlight=False)


def _adapters_of(admin: str, connection: Connection, model: str) -> tuple[AdapterStatus, ...]:
    with admin_client(admin, connection, model) as client:
        return client.adapters()


def _state(adapter: AdapterStatus) -> str:
    if adapter.refused and not adapter.workers:
        return "refused"
    return "served" if adapter.served else "loading"


@app.command()
def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="Folder of the adapter, which the router and all workers read."
        ),
    ],
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Load an adapter on all workers, or on none, while the cluster serves.

    Returns when requests may name the adapter. If a worker refuses it, prints the reason. The
    workers of a model that sleeps load the adapter when they start.

    Example: kvrelay adapters load sql ./sql-lora
    """
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model) as client:
        found = client.load_adapter(name, os.path.abspath(path))
    print(f"loaded {found.name} {found.adapter_id[:8]} workers={found.workers}")
    if not found.workers:
        print("The model sleeps. Its workers load the adapter when a request wakes it.")


@app.command()
def unload(
    name: Name,
    admin: Admin = DEFAULT_ADMIN,
    model: ModelName = "",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Stop serving an adapter. Requests that run with it go on to their end.

    Example: kvrelay adapters unload sql
    """
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model) as client:
        client.unload_adapter(name)
    print(f"unloaded {name}")
