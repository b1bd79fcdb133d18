"""What `kvrelay loadtest run` and `sweep` are asked for, checked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from kvrelay.loadtest.traces.replay import Replay
    from kvrelay.loadtest.workload import PlannedRequest, Workload

# What follows the first after --goodput
Words = Annotated[list[str] | None, typer.Argument(hidden=True)]
TargetOption = Annotated[
    str,
    typer.Option(
        envvar="KVRELAY_TARGET", metavar="HOST:PORT|http[s]://HOST:PORT", help="gRPC, or HTTP."
    ),
]
NumRequests = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="100 without --duration or --trace.")
]
Duration = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Nothing is sent after it.")
]
SweepRequests = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="At each rate; ends it if it comes first.")
]
SweepDuration = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="At each rate; 60 if neither it nor --num-requests is given."
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(metavar="B", help="1 is Poisson; less comes in bursts; inf is evenly spaced."),
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="DIST",
        help="N, LOW-HIGH, or lognormal:median=M,sigma=S,min=A,max=B. 256 if not given.",
    ),
]
OutputTokens = Annotated[
    str | None, typer.Option(metavar="DIST", help="Likewise; 64 if not given.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="S", help="The same seed plans the same load; a new one each time if not given."
    ),
]
Text = Annotated[
    bool, typer.Option("--text/--token-ids", help="Send words instead of random token ids.")
]
VocabSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="If the target does not tell.")
]
Timeout = Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="For each request.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="METRIC:MS...", help="Objectives: ttft:MS tpot:MS e2e:MS."),
]
Admin = Annotated[
    str | None,
    typer.Option(
        envvar="KVRELAY_ADMIN",
        metavar="HOST:PORT",
        help="Record the cluster's timeline. A gRPC target's next port is tried.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="http://HOST:PORT", help="Where the cache counters are, if not at the target."
    ),
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all rows and numbers to it.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots to it.")
]
AllowLocal = Annotated[
    bool,
    typer.Option(
        "--allow-local",
        help="Do not fail when long prompts went local for want of prefill workers.",
    ),
]


class Load(Protocol):
    def plan(self, vocab_size: int, max_model_len: int = 0) -> Iterator[PlannedRequest]: ...

    def options(self) -> dict[str, Any]: ...


def _check_duration(duration: float | None) -> None:
    above_zero(duration=duration)
    if duration == float("inf"):
        raise typer.BadParameter("--duration inf has no end.")


def seed_of(given: int | None) -> int:
    """A new one where none is given: prompts that were sent before would be answered from
    caches.
    """
    return secrets.randbelow(2**31) if given is None else given


def above_zero(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise typer.BadParameter(f"--{name.replace('_', '-')} {number:g} is not above 0.")


def can_be_written(*files: Path | None) -> None:
    """Refuses a file that has no folder to be in, before the time of a test is spent."""
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise typer.BadParameter(
                f"{file} cannot be written: {'a folder' if file.is_dir() else 'no such folder'}."
            )


def exclude(option: str, others: Mapping[str, object], why: str) -> None:
    """Refuses any of the others that is given beside the option."""
    for name, value in others.items():
        if value not in (None, False):
            raise typer.BadParameter(f"{option} and {name} exclude each other: {why}.")


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
    """A drawn load. Raises InvalidArgument, typer.BadParameter."""
    import math

    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.rate import parse_rate, seconds_of
    from kvrelay.loadtest.workload import Workload

    above_zero(burstiness=burstiness)
    _check_duration(duration)
    stages = None if concurrency else parse_rate(rate or "1")
    if stages and math.isinf(stages[0].first) and num_requests is None:
        raise typer.BadParameter("--rate inf needs --num-requests.")
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
    """A trace as a load. Raises InvalidArgument, typer.BadParameter."""
    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.traces.replay import Replay
    from kvrelay.loadtest.traces.trace_file import FORMATS, guess_format

    _check_duration(duration)
    if not begin >= 0:
        raise typer.BadParameter(f"--trace-start {begin:g} is below 0.")
    if form not in (None, *FORMATS):
        raise typer.BadParameter(f"--trace-format {form} is none of {', '.join(FORMATS)}.")
    form = form or guess_format(trace)
    if form != "servegen":
        lengths = {"--prompt-tokens": prompt_tokens, "--output-tokens": output_tokens}
        exclude("--trace", lengths, "the trace says how long its requests are; see --length-scale")
    elif num_requests is None and duration is None:
        raise typer.BadParameter("a trace of rates needs --num-requests or --duration.")
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
            f"{name} {text!r} is not a number or a fraction like 1/32."
        ) from error
    if scale <= 0:
        raise typer.BadParameter(f"{name} {text} is not above 0.")
    return scale


def sweep_rates(text: str) -> list[float] | tuple[float, float]:
    """`1,2,4`: each of them; `1..16`: the bounds of a search."""
    low, dots, high = text.partition("..")
    try:
        rates = [float(low), float(high)] if dots else [float(one) for one in text.split(",")]
    except ValueError:
        rates = []
    if (
        not rates
        or not all(0 < rate < float("inf") for rate in rates)
        or (dots and not rates[0] < rates[1])
    ):
        raise typer.BadParameter(
            f"--rates {text!r} is neither R,R,... nor LOW..HIGH, in requests per second above 0."
        )
    return (rates[0], rates[1]) if dots else rates
