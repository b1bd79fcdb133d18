"""Options of the commands that can print JSON."""

from __future__ import annotations

from typing import Annotated

import typer

PrintJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
# The same with a variable that several commands share.
AsJson = Annotated[
    bool, typer.Option("--json", envvar="KVRELAY_JSON", help="Print one JSON object.")
]
