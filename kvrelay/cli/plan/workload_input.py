"""Reads the workload of `kvrelay plan`: a distribution, a trace, or a load test's record."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import typer

from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.planning.quantity import check_number, plain
from kvrelay.planning.workload import MAX_LENGTHS, Workload, check_lengths, recorded

# Requests of a trace.
_MAX_REQUESTS = 20_000_000
_MAX_RATE = 1e6


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The options that describe a workload, as they were given."""

    rate: float | None
    prompt_tokens: str | None
    output_tokens: str | None
    burstiness: float | None
    cached_share: float | None
    trace: Path | None
    trace_format: str | None
    trace_start: float
    duration: float | None
    num_requests: int | None
    record: Path | None


def read_workload(given: WorkloadOptions) -> Workload | None:
    """Returns the workload; None if none is given. Raises BadParameter or InvalidArgument for an
    option, and FailedPrecondition for the content of a file.
    """
    if given.rate is not None:
        check_number(given.rate, "--rate", 1e-6, _MAX_RATE)
    if given.cached_share is not None:
        check_number(given.cached_share, "--cached-share", 0, 0.999)
    if given.trace is not None and given.record is not None:
        raise typer.BadParameter("--trace cannot be combined with --record; give one of them.")
    if given.trace is None:
        only = {
            "--trace-format": given.trace_format,
            "--trace-start": given.trace_start or None,
            "--duration": given.duration,
            "--num-requests": given.num_requests,
        }
        if wrong := next((name for name, value in only.items() if value is not None), None):
            raise typer.BadParameter(f"{wrong} requires --trace.")
    if given.trace is not None:
        return _traced(given, given.trace)
    if given.record is not None:
        return _recorded(given, given.record)
    return _drawn(given)


def _drawn(given: WorkloadOptions) -> Workload | None:
    """Returns a workload of distributions. The sample is the same each time."""
    if given.rate is None:
        others = (given.prompt_tokens, given.output_tokens, given.burstiness, given.cached_share)
        if any(one is not None for one in others):
            raise typer.BadParameter("a workload needs --rate, --trace or --record.")
        return None
    from kvrelay.loadtest.lengths import parse_lengths

    burstiness = 1.0 if given.burstiness is None else given.burstiness
    if not burstiness > 0:
        raise typer.BadParameter(f"--burstiness is {burstiness:g}; give a number above 0.")
    prompts = parse_lengths(given.prompt_tokens or "1024", "prompt_tokens")
    answers = parse_lengths(given.output_tokens or "256", "output_tokens")
    random = Random(0)
    lengths = [(prompts.draw(random), answers.draw(random)) for _ in range(MAX_LENGTHS)]
    # The gaps have a gamma distribution of this shape, whose SCV is its inverse.
    scv = 0.0 if math.isinf(burstiness) else min(1e6, 1 / burstiness)
    told = f"{plain(given.rate)} requests/s, prompts {prompts}, answers {answers} tokens"
    return Workload(
        given.rate,
        given.rate,
        scv,
        check_lengths(lengths, "the distribution"),
        given.cached_share or 0.0,
        told,
    )


def _traced(given: WorkloadOptions, trace: Path) -> Workload:
    from kvrelay.cli.loadtest.options import replay
    from kvrelay.loadtest.traces.trace import TraceError

    _is_there("--trace", trace, or_folder=True)
    _no_burstiness(given)
    try:
        load = replay(
            trace,
            given.trace_format,
            given.trace_start,
            "1",
            "1",
            given.num_requests,
            given.duration,
            given.prompt_tokens,
            given.output_tokens,
            0,
        )
        requests = load.requests()
    except TraceError as error:
        raise FailedPrecondition(error.message) from None
    except InvalidArgument as error:
        # The format of a file that cannot be recognised is its content.
        raise (FailedPrecondition(error.message) if error.field == "trace" else error) from None
    if len(requests) > _MAX_REQUESTS:
        raise FailedPrecondition(
            f"{trace}: more than {_MAX_REQUESTS:,} requests; give --num-requests or --duration"
        )
    return recorded(
        [one.at for one in requests],
        [(one.input_tokens, one.output_tokens) for one in requests],
        str(trace),
        given.rate,
        given.cached_share or 0.0,
    )


def _recorded(given: WorkloadOptions, record: Path) -> Workload:
    from kvrelay.loadtest.report.report_file import load_report

    _is_there("--record", record)
    _no_burstiness(given)
    for name, value in (
        ("--prompt-tokens", given.prompt_tokens),
        ("--output-tokens", given.output_tokens),
    ):
        if value is not None:
            raise typer.BadParameter(f"--record cannot be combined with {name}: it has lengths.")
    try:
        rows = load_report(record).answered
    except InvalidArgument as error:
        raise FailedPrecondition(error.message) from None
    kept = sorted((row for row in rows if row.prompt_tokens > 0), key=lambda row: row.scheduled_s)
    prompts = sum(row.prompt_tokens for row in kept)
    cached = sum(row.cached_tokens for row in kept) / prompts if prompts else 0.0
    share = min(0.999, max(0.0, cached)) if given.cached_share is None else given.cached_share
    found = recorded(
        [row.scheduled_s for row in kept],
        [(row.prompt_tokens, row.output_tokens) for row in kept],
        str(record),
        given.rate,
        share,
    )
    return replace(found, source=f"{record}, {len(kept):,} answered requests")


def _is_there(option: str, path: Path, *, or_folder: bool = False) -> None:
    """Raises BadParameter for a path that is not there, and for a device or a pipe, which may have
    no end.
    """
    try:
        if path.is_file() or (or_folder and path.is_dir()):
            return
        what = "is not a regular file" if path.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise typer.BadParameter(f"{option} {path!s:.200} {what}.")


def _no_burstiness(given: WorkloadOptions) -> None:
    if given.burstiness is not None:
        raise typer.BadParameter("--burstiness cannot be combined with a recording.")
