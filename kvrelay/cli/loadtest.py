"""`kvrelay loadtest`: the load harness."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure a cluster under load.", no_args_is_help=True)
