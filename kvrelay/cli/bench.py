"""`kvrelay bench`: what the machine can do, and how much of it is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.render import console

if TYPE_CHECKING:
    from kvrelay.bench.run import Progress

app = typer.Typer(
    help="Measure parts of kvrelay against this machine's own limits.",
    epilog="Example: kvrelay bench engine --quick",
)


@app.callback()
def bench() -> None:
    """Measure parts of kvrelay against this machine's own limits."""


@app.command()
@requires_cluster_extra
def engine(
    model: Annotated[
        str, typer.Option(metavar="DIR|HUB_ID|demo|m200", help="m200 is made on first use: 0.4 GB in the cache folder.")
    ] = "m200",
    weights: Annotated[Literal["auto", "int8"], typer.Option(help="auto keeps them as the model has them.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="On as many cores, the first allowed.")] = 1,
    chunk_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a prompt in one step.")] = 512,
    runs: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Of which the median counts.")] = 5,
    peer: Annotated[
        str | None, typer.Option(metavar="vllm=PYTHON", help="In turns with vLLM, as that Python has it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases, less exactly.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time prefill and decode steps of the engine beside the limits of the cores that it runs on.

    The limits are measured first: how fast torch multiplies matrices and how fast memory is read. No request, no
    network, no scheduler: only the model, called as workers call it, with random prompts. Nothing else should run.

    Example: kvrelay bench engine --peer vllm=/opt/vllm/bin/python --json
    """
    from kvrelay.bench.run import Options, run
    from kvrelay.bench.table import report_view

    options = Options(
        model=model,
        weights=weights,
        cores=_cores(threads),
        chunk_tokens=chunk_tokens,
        runs=runs,
        peer_python=_peer_python(peer),
        quick=quick,
    )
    with _progress() as progress:
        report = run(options, progress)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


def _cores(threads: int) -> tuple[int, ...]:
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise typer.BadParameter(f"--threads {threads} is more than the {len(allowed)} cores that may be used here.")
    return tuple(allowed[:threads])


def _peer_python(peer: str | None) -> str | None:
    if peer is None:
        return None
    name, _, path = peer.partition("=")
    python = shutil.which(path) if path else None
    if name != "vllm" or python is None:
        raise typer.BadParameter(f"--peer {peer} is not vllm=PYTHON with the Python of an environment that has vLLM.")
    return os.path.abspath(python)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on stderr, drawn when something is done: a thread that draws them would take time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), auto_refresh=False) as bars:

        def progress(what: str, total: int) -> Callable[[], None]:
            task = bars.add_task(what, total=total)
            bars.refresh()

            def done() -> None:
                bars.advance(task)
                bars.refresh()

            return done

        yield progress
