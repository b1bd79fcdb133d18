"""Options of the commands that can print JSON."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", envvar="KVRELAY_JSON", help="Print one JSON object.")
]
