"""`kvrelay status` and `kvrelay top`: what a cluster is doing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvrelay.cli import render

Admin = Annotated[str, typer.Option(envvar="KVRELAY_ADMIN", metavar="HOST:PORT", help="The cluster's admin listener.")]
DEFAULT_ADMIN = "127.0.0.1:50052"


def status(
    admin: Admin = DEFAULT_ADMIN,
    as_json: Annotated[bool, typer.Option("--json", envvar="KVRELAY_JSON", help="Print one object.")] = False,
) -> None:
    """Show pools, workers and the last scaling decisions.

    Example: kvrelay status --admin 127.0.0.1:50052 --json
    """
    from kvrelay.client.admin import AdminClient

    with AdminClient(admin) as client:
        now = client.status()
    if as_json:
        print(json.dumps(asdict(now), indent=2))
    else:
        render.console().print(render.status_view(now))


def top(
    admin: Admin = DEFAULT_ADMIN,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 1.0,
) -> None:
    """Show the same live, until Ctrl-C.

    Example: kvrelay top --interval 0.5
    """
    from rich.live import Live

    from kvrelay.client.admin import AdminClient

    console = render.console()
    if not console.is_terminal:
        raise typer.BadParameter("the output is not a terminal; use kvrelay status")
    with AdminClient(admin) as client, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            for now in client.watch(interval):
                live.update(render.status_view(now), refresh=True)
        except KeyboardInterrupt:
            return
