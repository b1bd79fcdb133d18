"""`kvrelay loadtest`: runs load tests, and shows and compares their reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.entry import INTERRUPTED
from kvrelay.cli.loadtest import options
from kvrelay.cli.loadtest.result_files import write_results
from kvrelay.cli.options.connection import ModelName, TlsCa, TlsCert, TlsKey, TokenFile
from kvrelay.cli.terminal.help_page import App
from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views import render
from kvrelay.planning.quantity import plain

if TYPE_CHECKING:
    from kvrelay.loadtest.report.sweep_report import Report
    from kvrelay.loadtest.sweep import Sweep

# Default duration at each rate; long enough for a queue to build up.
_SWEEP_S = 60.0

app = App(
    help="Measure a cluster under load.",
    epilog="Example: kvrelay loadtest run --rate 2 --num-requests 100",
)


@app.command()
def run(
    slo: options.Words = None,
    target: options.TargetOption = "127.0.0.1:50051",
    rate: options.RateStages = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Concurrent requests of a closed loop, instead of --rate."
        ),
    ] = None,
    num_requests: options.NumRequests = None,
    duration: options.Duration = None,
    burstiness: options.Burstiness = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    seed: options.Seed = None,
    text: options.Text = False,
    vocab_size: options.VocabSize = None,
    timeout: options.Timeout = 600.0,
    trace: options.Trace = None,
    trace_format: options.TraceFormat = None,
    trace_start: options.TraceStart = 0.0,
    time_scale: options.TimeScale = "1",
    length_scale: options.LengthScale = "1",
    goodput: options.Goodput = None,
    expect_path: Annotated[
        str | None,
        typer.Option(
            metavar="disaggregated|local", help="Exit with 1 if a request took the other path."
        ),
    ] = None,
    allow_local: options.AllowLocal = False,
    model: ModelName = "",
    admin: options.Admin = None,
    metrics: options.Metrics = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    file: options.Json = None,
    html: options.Html = None,
) -> None:
    """Send requests at their scheduled times, and measure latencies from the scheduled times.

    Requests are sent no matter how many are in progress, except with --concurrency. Exits with 1 if
    a request failed, or took the local path because no prefill worker was available. Ctrl-C ends
    the test and reports the requests so far. Rates are totals divided by the time from the start to
    the end of the last answer.

    Example: kvrelay loadtest run --rate 2 --num-requests 100 --prompt-tokens 32-512 --goodput
    ttft:200 tpot:50

    Example: kvrelay loadtest run --trace conversation.jsonl --length-scale 1/32 --duration 600
    --html run.html
    """
    from kvrelay.cli.loadtest.run import Settings, run_test
    from kvrelay.client.connection import Connection
    from kvrelay.loadtest.report.tables import report_table

    options.can_be_written(file, html)
    options.finite(timeout=timeout)
    seed = options.seed_of(seed)

    if concurrency:
        exclusive = {"--rate": rate, "--burstiness": burstiness}
        options.exclude(
            "--concurrency", exclusive, "a closed loop sends a request when another ends"
        )
    if trace is not None:
        exclusive = {"--rate": rate, "--burstiness": burstiness, "--text": text}
        options.exclude(
            "--trace", exclusive, "the trace sets the times and prompts; use --time-scale"
        )
        shape = (trace, trace_format, trace_start, time_scale, length_scale, num_requests, duration)
        load: options.Load = options.replay(*shape, prompt_tokens, output_tokens, seed)
    else:
        options.require_trace(trace_format, trace_start, time_scale, length_scale)
        lengths = (prompt_tokens, output_tokens, text, seed)
        load = options.workload(rate, concurrency, burstiness, num_requests, duration, *lengths)
    if expect_path not in (None, "disaggregated", "local"):
        raise typer.BadParameter(
            f"--expect-path {expect_path} is not a path; allowed are disaggregated and local."
        )
    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    settings = Settings(
        target,
        timeout,
        admin,
        metrics,
        vocab_size,
        options.objectives(goodput, slo),
        connection,
        model,
    )
    report = run_test(settings, load, concurrency, duration)
    render.console().print(report_table(report))
    _exit(report, _complaints(report, expect_path, allow_local), report.interrupted, file, html)


@app.command()
def sweep(
    slo: options.Words = None,
    target: options.TargetOption = "127.0.0.1:50051",
    rates: Annotated[
        str,
        typer.Option(
            metavar="R,R,...|LOW..HIGH", help="Rates to test, or the bounds of a binary search."
        ),
    ] = "1..32",
    attainment: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of requests that must meet every objective."),
    ] = 0.9,
    precision: Annotated[
        float, typer.Option(metavar="SHARE", help="Relative precision of the search.")
    ] = 0.1,
    num_requests: options.SweepRequests = None,
    duration: options.SweepDuration = None,
    burstiness: options.Burstiness = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    seed: options.Seed = None,
    text: options.Text = False,
    vocab_size: options.VocabSize = None,
    timeout: options.Timeout = 600.0,
    goodput: options.Goodput = None,
    allow_local: options.AllowLocal = False,
    model: ModelName = "",
    admin: options.Admin = None,
    metrics: options.Metrics = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    file: options.Json = None,
    html: options.Html = None,
) -> None:
    """Find the highest rate at which enough requests meet every objective.

    All rates have the same lengths and relative gaps, but different prompts, so that prefix caches
    do not help. A failed request misses its objectives. Exits with 1 if no request of a rate is
    answered, and reports the earlier rates.

    Example: kvrelay loadtest sweep --rates 1..16 --goodput ttft:500 tpot:50 --attainment 0.9 --html
    sweep.html
    """
    from kvrelay.cli.loadtest.run import Settings, run_sweep
    from kvrelay.client.connection import Connection
    from kvrelay.loadtest.report.tables import sweep_table

    options.can_be_written(file, html)
    options.above_zero(attainment=attainment, precision=precision)
    options.finite(timeout=timeout, precision=precision)
    if attainment > 1:
        raise typer.BadParameter(
            f"--attainment {attainment:g} is above 1; give a share such as 0.9."
        )
    slos = options.objectives(goodput, slo)
    if not slos:
        raise typer.BadParameter(
            "a sweep requires objectives; give --goodput ttft:MS tpot:MS e2e:MS."
        )
    connection = Connection(token_file, tls_ca, tls_cert, tls_key)
    settings = Settings(target, timeout, admin, metrics, vocab_size, slos, connection, model)
    lengths = (prompt_tokens, output_tokens, text, options.seed_of(seed))

    if num_requests is None and duration is None:
        duration = _SWEEP_S
    load = options.workload(None, None, burstiness, num_requests, duration, *lengths)
    found = run_sweep(settings, load, options.sweep_rates(rates), attainment, precision)
    render.console().print(sweep_table(found))
    reports = [report for _, report in found.runs]
    complaints = [_dead(rate, report) for rate, report in found.dead]
    if not allow_local:
        complaints += [text for report in reports for text in _strayed(report)]
    _exit(found, complaints, any(report.interrupted for report in reports), file, html)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="File that `run --json` or `sweep --json` wrote.")],
    html: options.Html = None,
) -> None:
    """Print the tables of a saved report, and optionally write its HTML page.

    Example: kvrelay loadtest report before.json --html before.html
    """
    from kvrelay.loadtest.report.report_file import load
    from kvrelay.loadtest.report.tables import report_table, sweep_table
    from kvrelay.loadtest.sweep import Sweep

    options.can_be_written(html)
    found = load(file)
    render.console().print(sweep_table(found) if isinstance(found, Sweep) else report_table(found))
    _exit(found, [], False, None, html)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="First file that `run --json` wrote.")],
    second: Annotated[Path, typer.Argument(help="Second file that `run --json` wrote.")],
    html: options.Html = None,
) -> None:
    """Print two saved reports side by side.

    Example: kvrelay loadtest compare before.json after.json --html change.html
    """
    from kvrelay.loadtest.html_report import compare_page
    from kvrelay.loadtest.report.report_file import load_report, write
    from kvrelay.loadtest.report.tables import comparison_table, load_differences

    options.can_be_written(html)
    reports = load_report(first), load_report(second)
    if differences := load_differences(*reports):
        note(f"the loads differ: {differences}")
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    if html is not None:
        write(html, compare_page(reports, names))
    render.console().print(comparison_table(*reports, names))


def _complaints(report: Report, expect_path: str | None, allow_local: bool) -> list[str]:
    found = []
    answered = len(report.answered)
    if failed := [row for row in report.rows if row.error]:
        found.append(
            f"{len(failed)} of {len(report.rows)} requests failed; the first: {failed[0].message}"
        )
    if expect_path and (others := answered - report.paths.get(expect_path, 0)):
        found.append(f"{others} of {answered} requests did not take the {expect_path} path")
    if not allow_local and expect_path != "local":
        found += _strayed(report)
    return found


def _strayed(report: Report) -> list[str]:
    rows = report.strayed
    if not rows:
        return []
    return [
        f"{len(rows)} of {len(report.answered)} requests took the local path for want of a prefill "
        f"worker; the first: {rows[0].why or 'no reason given'} (--allow-local accepts that)"
    ]


def _dead(rate: float, report: Report) -> str:
    sent = len(report.rows)
    first = report.rows[0].message if sent else "no request was sent"
    return (
        f"the sweep ended at {plain(rate, 4)} requests/s, where none of {sent} requests was "
        f"answered; the first: {first}"
    )


def _exit(
    result: Report | Sweep,
    complaints: list[str],
    interrupted: bool,
    file: Path | None,
    html: Path | None,
) -> None:
    """Tells the complaints, writes the files, and exits with the code of the test."""
    from kvrelay.loadtest.html_report import page
    from kvrelay.loadtest.report.report_file import save, write

    for one in complaints:
        note(one)
    all_saved = write_results(
        (file, lambda path: save(result, path)), (html, lambda path: write(path, page(result)))
    )
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if complaints or not all_saved:
        raise typer.Exit(1)
