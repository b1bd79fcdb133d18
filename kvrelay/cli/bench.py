"""`kvrelay bench`: what the machine can do, and how much of it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.views.render import console

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
        str,
        typer.Option(
            metavar="DIR|HUB_ID|demo|m200",
            help="m200 is made on first use: 0.4 GB in the cache folder.",
        ),
    ] = "m200",
    model_shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            help="Random weights in place of --model: m200, llama-3.1-8b, or a config.json's.",
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cuda is one GPU.")] = "cpu",
    weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="auto keeps them as the model has them.")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="On as many cores, the first allowed. 1; with a GPU all."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a prompt in one step.")
    ] = 512,
    runs: Annotated[
        int, typer.Option(min=1, max=100, metavar="N", help="Of which the median counts.")
    ] = 5,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="generate_batch|vllm=PYTHON",
            help="In turns with transformers' own continuous batching, or with vLLM, as that "
            "Python has it.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small cases, less exactly.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time prefill and decode steps of the engine beside the limits of the cores, or of the GPU,
    that it runs on.

    The limits are measured first: how fast torch multiplies matrices and how fast memory is read.
    No request, no network, no scheduler: only the model, called as workers call it, with random
    prompts. Nothing else should run.

    Example: kvrelay bench engine --peer vllm=/opt/vllm/bin/python --json
    """
    from kvrelay.bench.run import Options, run
    from kvrelay.bench.table import report_view

    options = Options(
        model=model,
        shape=model_shape,
        device=device,
        weights=weights,
        threads=threads,
        chunk_tokens=chunk_tokens,
        runs=runs,
        peer=peer,
        quick=quick,
    )
    with _progress() as progress:
        report = run(options, progress)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


@app.command()
@requires_cluster_extra
def handoff(
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR|HUB_ID|demo|m200",
            help="m200 is made on first use: 0.4 GB in the cache folder.",
        ),
    ] = "m200",
    transport: Annotated[
        list[str] | None,
        typer.Option(metavar="shm|grpc|gloo|nixl", help="Give it once for each; all without."),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a prompt in one step.")
    ] = 512,
    runs: Annotated[
        int, typer.Option(min=1, max=100, metavar="N", help="Of which the median counts.")
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time hand-offs of KV from one core to another beside what memory and loopback allow, and
    beside a prefill.

    A prefill worker and a decode worker's end, in processes of their own on a core each. Nothing
    else should run.

    Example: kvrelay bench handoff --transport shm --json
    """
    from kvrelay.bench.environment import first_cores
    from kvrelay.bench.handoff.rates import TRANSPORTS
    from kvrelay.bench.handoff.run import Options, run
    from kvrelay.bench.handoff.table import report_view

    first, second = first_cores(2)
    with _progress() as progress:
        report = run(
            Options(
                model, tuple(transport or TRANSPORTS), (first, second), chunk_tokens, runs, quick
            ),
            progress,
        )
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


@app.command()
@requires_cluster_extra
def router(
    seconds: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Of each case.")] = 5.0,
    requests: Annotated[
        int,
        typer.Option(
            min=100, metavar="N", help="Short ones, for the growth of the router's memory."
        ),
    ] = 100_000,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Stream tokens through a router on one core, from workers without an engine, which answer at
    once.

    What the router uses of its core, and how much later a token comes through it. Workers and
    clients are on another core. Nothing else should run.

    Example: kvrelay bench router --quick
    """
    import uvloop

    from kvrelay.bench.environment import first_cores
    from kvrelay.bench.router.run import Options, run
    from kvrelay.bench.router.table import report_view

    first, second = first_cores(2)
    options = Options((first, second), min(seconds, 1.0) if quick else seconds, requests, quick)
    with _progress() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run(options, progress))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on stderr, drawn when something is done: a thread that draws them would take time from
    what is measured.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), auto_refresh=False) as bars:

        def progress(what: str, total: int) -> Callable[[], None]:
            task = bars.add_task(what, total=total)
            bars.refresh()

            def done() -> None:
                bars.advance(task)
                bars.refresh()

            return done

        yield progress
