"""`kvrelay verify`: checks that all paths give the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.serve import OWN_CLUSTER, Config, Model
from kvrelay.cli.views.render import console

if TYPE_CHECKING:
    from kvrelay.verify.report import Report


@requires_cluster_extra
def verify(
    config: Config = None,
    model: Model = None,
    requests: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Requests per path.")
    ] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Dtype of the model. Only float32 is expected to give identical tokens."),
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove that all paths give the same tokens.

    Starts a separate cluster. Runs the same requests with `generate` of transformers, on the local
    path, on the disaggregated path over shm and over grpc, and on the disaggregated path while a
    decode worker is killed. Exits with 1 if an answer differs in float32, unless the configuration
    sets kv.dtype int8, which rounds.

    Example: kvrelay verify --requests 64 --json
    """
    from kvrelay.config.config_file import load_config
    from kvrelay.process.telemetry import configure_logging
    from kvrelay.verify.run import verify as run

    overrides: dict[str, object] = {**OWN_CLUSTER, "model.dtype": dtype}
    if model is not None:
        overrides["model.path"] = model
    loaded = load_config(config, overrides)
    configure_logging("error")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        starting: list[object] = [bars.add_task("starting the cluster", total=None)]

        def progress(what: str, total: int) -> Callable[[], None]:
            while starting:
                bars.remove_task(starting.pop())  # type: ignore[arg-type]
            task = bars.add_task(what, total=total)
            return lambda: bars.advance(task)

        report = asyncio.run(run(loaded, requests, progress))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    if dtype == "float32" and loaded.kv.dtype == "auto" and not report.identical:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    table = Table(title=f"{report.requests} requests, {report.dtype}", title_justify="left")
    for column in (
        "path",
        "compared with",
        "identical",
        "first difference",
        "median logit margin",
        "",
    ):
        table.add_column(column)
    for path in report.paths:
        first = path.differences[0] if path.differences else None
        table.add_row(
            path.path,
            path.expected,
            f"{path.identical} of {path.compared}",
            "none"
            if first is None
            else f"{first.case}: token {first.position} is {first.got}, not {first.expected}",
            "-" if path.median_margin is None else f"{path.median_margin:.4f}",
            path.note,
        )
    console().print(table)
