"""Options of `kvrelay loadtest run` and `sweep`, and their checks."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from kvrelay.config.special_file import is_special
from kvrelay.errors import InvalidArgument

if TYPE_CHECKING:
    from kvrelay.loadtest.slo import Slo
    from kvrelay.loadtest.traces.replay import Replay
    from kvrelay.loadtest.workload import PlannedRequest, Workload

# The values after the first value of --goodput.
Words = Annotated[list[str] | None, typer.Argument(hidden=True)]
TargetOption = Annotated[
    str,
    typer.Option(
        envvar="KVRELAY_TARGET",
        metavar="ADDRESS",
        help="Address of the router: HOST:PORT for gRPC, http://HOST:PORT for HTTP.",
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of requests. Default: 100, or unlimited with --duration or --trace.",
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Time after which no further request is sent."),
]
SweepRequests = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Most requests at each rate.")
]
SweepDuration = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Duration of each rate. Default: 60 if --num-requests is not given.",
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(
        metavar="B",
        help="Shape of the arrivals: 1 is Poisson, less is bursty, inf is even. Default: 1.",
    ),
]
RateStages = Annotated[
    str | None,
    typer.Option(
        metavar="R",
        help="Requests per second, inf, or stages R:SECONDS,FROM-TO:SECONDS,... Default: 1.",
    ),
]


# `kvrelay plan` declares these in a panel of its own, with other defaults.


def prompt_tokens_option(default: str = "", panel: str | None = None) -> Any:
    """Declares --prompt-tokens. default: a sentence that the help ends with."""
    told = "Prompt length: N, LOW-HIGH, or lognormal:median=M,sigma=S,min=A,max=B."
    return typer.Option(metavar="DIST", help=f"{told} {default}".rstrip(), rich_help_panel=panel)


def output_tokens_option(default: str = "", panel: str | None = None) -> Any:
    """Declares --output-tokens. default: a sentence that the help ends with."""
    told = "Answer length, in the forms of --prompt-tokens."
    return typer.Option(metavar="DIST", help=f"{told} {default}".rstrip(), rich_help_panel=panel)


def trace_option(verb: str, panel: str | None = None) -> Any:
    """Declares --trace. verb: what happens to the trace."""
    told = f"Trace to {verb}: Mooncake JSONL, Azure CSV, ServeGen client or folder."
    return typer.Option(metavar="FILE", help=told, rich_help_panel=panel)


def trace_format_option(panel: str | None = None) -> Any:
    """Declares --trace-format."""
    return typer.Option(
        metavar="mooncake|azure|servegen",
        help="Format of the trace. Default: detected from the file.",
        rich_help_panel=panel,
    )


def trace_start_option(panel: str | None = None) -> Any:
    """Declares --trace-start."""
    told = "Time in the trace at which to begin."
    return typer.Option(metavar="SECONDS", help=told, rich_help_panel=panel)


PromptTokens = Annotated[str | None, prompt_tokens_option("Default: 256.")]
OutputTokens = Annotated[str | None, output_tokens_option("Default: 64.")]
Trace = Annotated[Path | None, trace_option("replay")]
TraceFormat = Annotated[str | None, trace_format_option()]
TraceStart = Annotated[float, trace_start_option()]
TimeScale = Annotated[
    str,
    typer.Option(
        metavar="X", help="Factor on the times between requests; 1/10 is ten times faster."
    ),
]
LengthScale = Annotated[
    str,
    typer.Option(metavar="X", help="Factor on the lengths of prompts, prefixes and answers."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        help="Seed of lengths, times and prompts; equal seeds give equal loads. Default: random.",
    ),
]
Text = Annotated[
    bool, typer.Option("--text/--token-ids", help="Send text instead of random token ids.")
]
VocabSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Vocabulary size. Default: as reported by the target."),
]
Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", help="Timeout of each request.")
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="METRIC:MS...", help="Latency objectives: ttft:MS tpot:MS e2e:MS."),
]
Admin = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_ADMIN",
        metavar="HOST:PORT",
        help="Admin listener, to record the cluster's timeline. Default: the next port of a gRPC "
        "target.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="http://HOST:PORT of /metrics, for the cache counters. Default: the target.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="File to write all requests and results to."),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="File to write an HTML page with plots to."),
]
AllowLocal = Annotated[
    bool,
    typer.Option(
        "--allow-local",
        help="Accept requests that took the local path for want of a prefill worker.",
    ),
]


class Load(Protocol):
    """The requests of a test: drawn at random, or replayed from a trace."""

    def plan(self, vocab_size: int, max_model_len: int = 0) -> Iterator[PlannedRequest]:
        """Yields the requests in the order of their times."""

    def options(self) -> dict[str, Any]:
        """Returns the options that the report shows."""


def _check_duration(duration: float | None) -> None:
    above_zero(duration=duration)
    finite(duration=duration)


def seed_of(given: int | None) -> int:
    """Returns the given seed, or a random one, because prefix caches would answer prompts that were
    sent before.
    """
    return secrets.randbelow(2**31) if given is None else given


def above_zero(**numbers: float | None) -> None:
    """Raises typer.BadParameter for an option that is not above 0. None is not checked."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is {number:g}; give a number above 0."
            )


def finite(**numbers: float | None) -> None:
    """Raises typer.BadParameter for an option that is not finite: a report cannot hold it. None is
    not checked.
    """
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} {number:g} is not finite; give a finite number."
            )


def can_be_written(*files: Path | None) -> None:
    """Raises typer.BadParameter for a file that cannot be written, before the test starts."""
    for file in files:
        if file is None:
            continue
        reason = ""
        if file.is_dir():
            reason = "it is a folder"
        elif not file.absolute().parent.is_dir():
            reason = "its folder does not exist"
        elif not is_special(file):
            try:
                _try_to_write(file)
            except OSError as error:
                reason = error.strerror or str(error)
        if reason:
            raise typer.BadParameter(f"{file} cannot be written: {reason}.")


def _try_to_write(file: Path) -> None:
    """Opens the file for writing, and leaves everything as it was. Raises OSError."""
    is_new = not file.exists()
    with file.open("ab"):
        pass
    if is_new:
        with contextlib.suppress(FileNotFoundError):
            # Another run may have written its report meanwhile.
            if not file.stat().st_size:
                file.unlink()


def exclude(option: str, others: Mapping[str, object], why: str) -> None:
    """Raises typer.BadParameter if one of the others is given together with the option."""
    for name, value in others.items():
        if value not in (None, False):
            raise typer.BadParameter(f"{option} cannot be combined with {name}: {why}.")


def require_trace(
    trace_format: str | None, trace_start: float, time_scale: str, length_scale: str
) -> None:
    """Raises typer.BadParameter for an option that has no meaning without --trace."""
    for name, value in (("format", trace_format), ("start", trace_start)):
        if value:
            raise typer.BadParameter(f"--trace-{name} requires --trace.")
    if (time_scale, length_scale) != ("1", "1"):
        raise typer.BadParameter("--time-scale and --length-scale require --trace.")


def workload(
    rate: str | None,
    concurrency: int | None,
    burstiness: float | None,
    num_requests: int | None,
    duration: float | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    text: bool,
    seed: int,
) -> Workload:
    """Returns a random load. Raises InvalidArgument or typer.BadParameter."""
    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.rate import parse_rate, seconds_of
    from kvrelay.loadtest.workload import Workload

    above_zero(burstiness=burstiness)
    _check_duration(duration)
    stages = None if concurrency else parse_rate(rate or "1")
    if stages and math.isinf(stages[0].first) and num_requests is None:
        raise typer.BadParameter("--rate inf requires --num-requests.")
    ends = num_requests or duration or (stages and math.isfinite(seconds_of(stages)))
    return Workload(
        rate=stages,
        burstiness=1.0 if burstiness is None else burstiness,
        num_requests=num_requests if ends else 100,
        duration=duration,
        prompt_tokens=parse_lengths(prompt_tokens or "256", "prompt_tokens"),
        output_tokens=parse_lengths(output_tokens or "64", "output_tokens"),
        text=text,
        seed=seed,
    )


def replay(
    trace: Path,
    form: str | None,
    begin: float,
    time_scale: str,
    length_scale: str,
    num_requests: int | None,
    duration: float | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    seed: int,
) -> Replay:
    """Returns a trace as a load. Raises InvalidArgument or typer.BadParameter."""
    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.traces.replay import Replay
    from kvrelay.loadtest.traces.trace_file import FORMATS, guess_format

    _check_duration(duration)
    if not begin >= 0:
        raise typer.BadParameter(f"--trace-start is {begin:g}; give 0 or more seconds.")
    finite(trace_start=begin)
    if form not in (None, *FORMATS):
        raise typer.BadParameter(
            f"--trace-format {form} is unknown; allowed are {', '.join(FORMATS)}."
        )
    form = form or guess_format(trace)
    if form != "servegen":
        lengths = {"--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
        exclude("--trace", lengths, "the trace sets the lengths; use --length-scale")
    elif num_requests is None and duration is None:
        raise typer.BadParameter("a ServeGen trace has no end; give --num-requests or --duration.")
    return Replay(
        trace=trace,
        form=form,
        begin=begin,
        time_scale=_scale("--time-scale", time_scale),
        length_scale=_scale("--length-scale", length_scale),
        num_requests=num_requests,
        duration=duration,
        prompt_tokens=parse_lengths(prompt_tokens or "256", "prompt_tokens"),
        output_tokens=parse_lengths(output_tokens or "64", "output_tokens"),
        seed=seed,
    )


def _scale(name: str, text: str) -> Fraction:
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise typer.BadParameter(
            f"{name} {text!r} is not a number; give one such as 2, 0.5 or 1/32."
        ) from error
    if scale <= 0:
        raise typer.BadParameter(f"{name} is {text}; give a number above 0.")
    return scale


def sweep_rates(text: str) -> list[float] | tuple[float, float]:
    """Returns the rates of `1,2,4`, or the bounds of a search for `1..16`. Raises
    typer.BadParameter.
    """
    low, dots, high = text.partition("..")
    try:
        rates = [float(low), float(high)] if dots else [float(one) for one in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise typer.BadParameter(
            f"--rates {text!r} is not a list of rates; give R,R,... or LOW..HIGH in requests per "
            "second, above 0."
        )
    if dots and not rates[0] < rates[1]:
        raise typer.BadParameter(f"--rates {text!r}: the first bound must be below the second.")
    return (rates[0], rates[1]) if dots else rates


def objectives(goodput: list[str] | None, words: list[str] | None) -> tuple[Slo, ...]:
    """Returns the objectives of --goodput, whose values after the first are words of the command
    line. Raises InvalidArgument, also for a word that no option takes.
    """
    from kvrelay.loadtest.slo import parse_slos

    for word in words or ():
        if not goodput or ":" not in word:
            raise InvalidArgument(
                f"unexpected argument {word!r:.100}; begin a value with its option, such as "
                "--rate 4"
            )
    return parse_slos([*(goodput or ()), *(words or ())])
