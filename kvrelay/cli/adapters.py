"""`kvrelay adapters`: loads, unloads and lists LoRA adapters."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from kvrelay.cli.options.connection import ModelName, TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.options.output import AsJson
from kvrelay.cli.status import DEFAULT_ADMIN, Admin, admin_client
from kvrelay.cli.terminal.help_page import App
from kvrelay.cli.views import render

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
        models = (model,) if model else client.status().models or ("",)
    found = []
    for name in models:
        with admin_client(admin, connection, name) as client:
            found += [(name, one) for one in client.adapters()]
    if as_json:
        print(json.dumps([{"model": name} | asdict(one) for name, one in found], indent=2))
        return
    if not found:
        print("no adapters; `kvrelay adapters load NAME FOLDER` loads one")
        return
    from rich.table import Table

    # Programs read lines as they are.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    of_model = ["model"] if len(models) > 1 else []
    for column in (*of_model, "adapter", "state", "workers", "from", "id", "folder"):
        table.add_column(column, overflow="fold")
    for name, one in found:
        table.add_row(
            *([name] if of_model else []),
            one.name,
            "served" if one.served else "loading",
            str(one.workers),
            "configuration" if one.configured else "command",
            one.adapter_id[:8],
            one.path,
        )
    render.console(render.UNBROKEN).print(table)


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

    Returns when requests may name the adapter. If a worker refuses it, prints the reason.

    Example: kvrelay adapters load sql ./sql-lora
    """
    from kvrelay.client.connection import Connection

    with admin_client(admin, Connection(token_file, tls_ca, tls_cert, tls_key), model) as client:
        found = client.load_adapter(name, os.path.abspath(path))
    print(f"loaded {found.name} {found.adapter_id[:8]} workers={found.workers}")


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
