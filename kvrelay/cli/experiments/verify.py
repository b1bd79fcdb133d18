"""`kvrelay verify`: checks that all paths give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.cli.options.cluster import OWN_CLUSTER, Config, Model
from kvrelay.cli.options.output import PrintJson
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal import interrupt
from kvrelay.cli.views.render import console
from kvrelay.cli.views.verify_view import verify_view


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
    as_json: PrintJson = False,
) -> None:
    """Prove that all paths give the same tokens.

    Starts a separate cluster. Runs the same requests with `generate` of transformers, on the local
    path, on the disaggregated path over shm and over grpc, and on the disaggregated path while a
    decode worker is killed. Exits with 1 if an answer differs in float32, unless the configuration
    quantises KV, which rounds.

    Example: kvrelay verify --requests 64 --json
    """
    from kvrelay.config.config_file import load_one_model
    from kvrelay.process.telemetry import configure_logging
    from kvrelay.verify.run import verify as run

    overrides: dict[str, object] = {**OWN_CLUSTER, "model.dtype": dtype}
    if model is not None:
        overrides["model.path"] = model
    loaded = load_one_model(config, overrides)
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

        report = interrupt.run(run(loaded, requests, progress))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        out = console()
        out.print(verify_view(report, out.width))
    if dtype == "float32" and loaded.kv.dtype == "auto" and not report.identical:
        raise typer.Exit(1)
