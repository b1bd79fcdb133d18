"""`kvrelay loadtest`: the load harness."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from kvrelay.cli import render
from kvrelay.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvrelay.loadtest.row import Row
    from kvrelay.loadtest.workload import Workload

app = typer.Typer(
    help="Measure a cluster under load.",
    epilog="Example: kvrelay loadtest run --rate 2 --num-requests 100",
)


@app.command()
def run(
    slo: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,  # what follows the first after --goodput
    target: Annotated[
        str, typer.Option(envvar="KVRELAY_TARGET", metavar="HOST:PORT|http://HOST:PORT", help="gRPC, or HTTP.")
    ] = "127.0.0.1:50051",
    rate: Annotated[float, typer.Option(metavar="R", help="Requests per second; inf sends all at once.")] = 1.0,
    num_requests: Annotated[int | None, typer.Option(min=1, metavar="N", help="100 without --duration.")] = None,
    duration: Annotated[float | None, typer.Option(metavar="SECONDS", help="Arrivals end after it.")] = None,
    burstiness: Annotated[float, typer.Option(metavar="B", help="1 is Poisson; less comes in bursts.")] = 1.0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="DIST", help="N, LOW-HIGH, or lognormal:median=M,sigma=S,min=A,max=B.")
    ] = "256",
    output_tokens: Annotated[str, typer.Option(metavar="DIST", help="Likewise.")] = "64",
    seed: Annotated[int, typer.Option(metavar="S", help="The same seed plans the same load.")] = 0,
    text: Annotated[bool, typer.Option("--text/--token-ids", help="Send words instead of random token ids.")] = False,
    vocab_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="If the target does not tell.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="For each request.")] = 600.0,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="METRIC:MS...", help="Objectives: ttft:MS tpot:MS e2e:MS.")
    ] = None,
    expect_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Exit 1 if a request took another: disaggregated, local.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all rows and numbers to it.")
    ] = None,
) -> None:
    """Send requests as they come due, however many are under way, and measure from when each was due.

    Exits 1 if a request failed.

    Example: kvrelay loadtest run --rate 2 --num-requests 100 --prompt-tokens 32-512 --goodput ttft:200 tpot:50
    """
    import asyncio

    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.report import Report
    from kvrelay.loadtest.slo import parse_slos
    from kvrelay.loadtest.tables import report_table
    from kvrelay.loadtest.workload import Workload

    for name, number in (("rate", rate), ("burstiness", burstiness), ("duration", duration)):
        if number is not None and not number > 0:
            raise typer.BadParameter(f"--{name} {number:g} is not above 0.")
    if math.isinf(rate) and num_requests is None:
        raise typer.BadParameter("--rate inf needs --num-requests.")
    workload = Workload(
        rate=rate,
        burstiness=burstiness,
        num_requests=num_requests if num_requests or duration else 100,
        duration=duration,
        prompt_tokens=parse_lengths(prompt_tokens, "prompt_tokens"),
        output_tokens=parse_lengths(output_tokens, "output_tokens"),
        text=text,
        seed=seed,
    )
    slos = parse_slos([*(goodput or ()), *(slo or ())])
    if expect_path not in (None, "disaggregated", "local"):
        raise typer.BadParameter(f"--expect-path {expect_path} is neither disaggregated nor local.")
    rows = asyncio.run(_run(target, timeout, workload, vocab_size))
    report = Report({"target": target, "timeout": timeout, **asdict(workload)}, slos, rows)
    if file is not None:
        report.save(file)
    render.console().print(report_table(report))
    failed = sum(report.errors.values())
    strayed = len(report.answered) - report.paths.get(expect_path, 0) if expect_path else 0
    if failed:
        first = next(row for row in rows if row.error)
        typer.echo(f"kvrelay: {failed} of {len(rows)} requests failed; the first: {first.message}", err=True)
    if strayed:
        typer.echo(f"kvrelay: {strayed} of {len(report.answered)} requests did not go {expect_path}", err=True)
    if failed or strayed:
        raise typer.Exit(1)


async def _run(target: str, timeout: float, workload: Workload, vocab_size: int | None) -> tuple[Row, ...]:  # noqa: ASYNC109
    from kvrelay.loadtest.grpc_sender import GrpcSender
    from kvrelay.loadtest.http_sender import HttpSender
    from kvrelay.loadtest.runner import run_load

    kind: type[HttpSender] | type[GrpcSender] = HttpSender if "://" in target else GrpcSender
    async with kind(target, timeout) as sender:
        models = await sender.models()
        if not models:
            raise NotFound(f"{target} serves no model")
        vocab_size = vocab_size or models[0].vocab_size
        if not (vocab_size or workload.text):
            raise InvalidArgument(f"{target} does not tell its vocabulary; give --vocab-size or --text")
        plan = workload.plan(vocab_size)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("requests", total=len(plan))
            return await run_load(plan, sender, lambda _: progress.advance(bar))


@app.command()
def report(file: Annotated[Path, typer.Argument(help="What `run --json` wrote.")]) -> None:
    """Print the table of a saved test.

    Example: kvrelay loadtest report before.json
    """
    from kvrelay.loadtest.report import load_report
    from kvrelay.loadtest.tables import report_table

    render.console().print(report_table(load_report(file)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="What `run --json` wrote.")],
    second: Annotated[Path, typer.Argument(help="Likewise, later.")],
) -> None:
    """Print two saved tests side by side.

    Example: kvrelay loadtest compare before.json after.json
    """
    from kvrelay.loadtest.report import load_report
    from kvrelay.loadtest.tables import comparison_table

    table = comparison_table(load_report(first), load_report(second), (first.stem, second.stem))
    render.console().print(table)
