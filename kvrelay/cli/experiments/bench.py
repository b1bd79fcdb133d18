"""`kvrelay bench`: micro-benchmarks relative to the limits of the machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvrelay.cli.options.bench import (
    ChunkTokens,
    DeviceKind,
    ModelToMeasure,
    Runs,
    Threads,
    WeightFormat,
)
from kvrelay.cli.options.output import PrintJson
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.help_page import App
from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views.render import console
from kvrelay.errors import InvalidArgument
from kvrelay.process.machine import QUIET_CORES, busy_cores

if TYPE_CHECKING:
    from kvrelay.bench.run import Progress

app = App(
    help="Measure components of kvrelay against the limits of this machine.",
    epilog="Example: kvrelay bench engine --quick",
)


@app.callback()
def bench() -> None:
    """Measure components of kvrelay against the limits of this machine."""


@app.command()
@requires_cluster_extra
def engine(
    model: ModelToMeasure = "m200",
    model_shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            help="Shape of a model with random weights, instead of --model: m200, llama-3.1-8b, or "
            "a folder with a config.json.",
        ),
    ] = None,
    device: DeviceKind = "cpu",
    weights: WeightFormat = "auto",
    threads: Threads = None,
    chunk_tokens: ChunkTokens = 512,
    runs: Runs = 5,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="generate_batch|vllm=PYTHON",
            help="Engine to compare with: continuous batching of transformers, or the vLLM of "
            "that Python. Both engines run alternately.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a few small cases, with less precision.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Time prefill and decode steps of the engine, and compare them with the limits of the cores or
    the GPU.

    The limits are measured first: the rate of matrix multiplication with torch, and the memory
    bandwidth. The engine runs random prompts, without requests, network or scheduler. Run nothing
    else on the machine.

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
    with progress_bars() as progress:
        report = run(options, progress)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


@app.command()
@requires_cluster_extra
def handoff(
    model: ModelToMeasure = "m200",
    transport: Annotated[
        list[str] | None,
        typer.Option(
            metavar="shm|grpc|gloo|nixl", help="Transport to measure; repeatable. Default: all."
        ),
    ] = None,
    chunk_tokens: ChunkTokens = 512,
    runs: Runs = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Run a few small cases.")] = False,
    as_json: PrintJson = False,
) -> None:
    """Time hand-offs of KV between two cores, and compare them with the limits of memory and
    loopback, and with a prefill.

    The sender and the receiver are separate processes with one core each. Run nothing else on the
    machine.

    Example: kvrelay bench handoff --transport shm --json
    """
    from kv_transfer.transport_selection import missing_package
    from kvrelay.bench.environment import first_cores
    from kvrelay.bench.handoff.rates import LIMIT_OF, TRANSPORTS
    from kvrelay.bench.handoff.run import Options, run
    from kvrelay.bench.handoff.table import report_view

    for one in transport or ():
        if one not in LIMIT_OF:
            allowed = ", ".join(LIMIT_OF)
            raise InvalidArgument(
                f"--transport: {one!r:.40} is not measured here; allowed are {allowed}"
            )
        if missing := missing_package(one):
            raise InvalidArgument(f"--transport: {missing}")
    first, second = first_cores(2)
    with progress_bars() as progress:
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
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Duration of each case. Default: 5, or 1 with --quick.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=100,
            metavar="N",
            help="Number of short requests that measure the growth of the router's memory. "
            "Default: 100,000, or 500 with --quick.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1, max=32, metavar="N", help="Processes of the router, which share its core."
        ),
    ] = 1,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sglang-router|vllm-router=PYTHON",
            help="Router to compare with, of the environment of that Python; repeatable. It gets "
            "the same streams over HTTP, from workers that serve whole requests.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a few small cases.")] = False,
    as_json: PrintJson = False,
) -> None:
    """Stream tokens through a router on one core, from mock workers without an engine.

    Reports the CPU time of the router and the latency that it adds to each token. Mock workers and
    clients run on another core. Run nothing else on the machine.

    Example: kvrelay bench router --peer sglang-router=/opt/sglang-router/bin/python
    """
    import uvloop

    from kvrelay.bench.environment import first_cores
    from kvrelay.bench.router.peer_router import Peer
    from kvrelay.bench.router.run import Options, run
    from kvrelay.bench.router.table import report_view

    first, second = first_cores(2)
    options = Options(
        (first, second),
        seconds or (1.0 if quick else 5.0),
        requests or (500 if quick else 100_000),
        quick,
        processes,
        tuple(map(Peer.parse, peer or ())),
    )
    with progress_bars() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run(options, progress))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        console().print(report_view(report))


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Progress bars on stderr. They are drawn after each case, because a thread that draws them
    would disturb the measurement. Begins with a note if other programs would disturb it.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True), auto_refresh=False)

    def progress(what: str, total: int) -> Callable[[], None]:
        if not bars.tasks:
            if (busy := busy_cores()) > QUIET_CORES:
                note(
                    f"other programs keep {busy:.1f} of {os.cpu_count()} cores busy, and the "
                    "figures will be worse for it; run this again when they are done"
                )
            bars.start()
        task = bars.add_task(what, total=total)
        bars.refresh()

        def done() -> None:
            bars.advance(task)
            bars.refresh()

        return done

    try:
        yield progress
    finally:
        if bars.tasks:
            bars.stop()
