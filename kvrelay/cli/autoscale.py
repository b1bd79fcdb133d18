"""`kvrelay autoscale`: what a scaling policy does, before it is trusted with a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from kvrelay.cli.cluster_extra import requires_cluster_extra

if TYPE_CHECKING:
    from autoscaler.queueing_model import WorkerSpeed
    from autoscaler.replay import Verdict
    from kvrelay.config.autoscaling_policy import AutoscalingPolicy

_LOOKS = 50_000  # at a long trace; more often would only take longer

app = typer.Typer(
    help="Try a scaling policy.",
    epilog="Example: kvrelay autoscale explain configs/autoscaling/queue-depth.yaml --metrics "
    "run.json",
)


@app.callback()
def group() -> None:
    """Keeps `explain` a subcommand, as typer makes the only command of an app the app itself."""


@app.command()
@requires_cluster_extra
def explain(
    policy: Annotated[
        Path, typer.Argument(help="A policy file, as `autoscaling` in the configuration names it.")
    ],
    metrics: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="A load test's JSON, a CSV of metrics, or a trace (see below)."
        ),
    ],
    prefill: Annotated[
        int, typer.Option(min=0, metavar="N", help="Prefill workers at a trace's start.")
    ] = 1,
    decode: Annotated[
        int, typer.Option(min=1, metavar="N", help="Decode workers at a trace's start.")
    ] = 1,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1e-3, metavar="N", help="Of one prefill worker. Needed for a trace."),
    ] = None,
    decode_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1e-3, metavar="N", help="Of one full decode worker. Needed for a trace."),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(min=1e-3, metavar="MS", help="Of one sequence alone. Needed for a trace."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences on one decode worker.")
    ] = 32,
    kv_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="That one decode worker holds.")
    ] = 65536,
    start_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Until a new worker serves.")
    ] = 10.0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="DIST", help="Where a ServeGen client records none.")
    ] = "1024",
    output_tokens: Annotated[str, typer.Option(metavar="DIST", help="Likewise.")] = "256",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay what was recorded through a policy: which sizes it would have set, when, and why.

    FILE is what `kvrelay loadtest run --admin ... --json` wrote, or a CSV with the columns seconds,
    pool, size, ready and the policy's metrics; metrics then stay as they were recorded. A trace
    (Azure CSV, Mooncake JSONL, ServeGen's folder of rates) flows through a model of the pools
    instead, in which the sizes that the policy sets have their effect; `kvrelay bench engine`
    measures what the model has to know.

    Example: kvrelay autoscale explain policy.yaml --metrics conv.csv --prefill-tokens-per-s 8000
    --decode-tokens-per-s 1200 --itl-ms 12
    """
    from autoscaler.queueing_model import WorkerSpeed
    from kvrelay.cli.views.autoscale_view import explain_view
    from kvrelay.cli.views.render import console
    from kvrelay.config.config_file import load_policy

    rules = load_policy(policy)
    given = {
        "prefill-tokens-per-s": prefill_tokens_per_s,
        "decode-tokens-per-s": decode_tokens_per_s,
        "itl-ms": itl_ms,
    }
    if _is_record(metrics):
        if wrong := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(
                f"--{wrong[0]} is for traces; {metrics} is a record of metrics."
            )
        verdicts, note = _replayed(rules, metrics), "metrics as recorded"
    else:
        if missing := [name for name, value in given.items() if value is None]:
            raise typer.BadParameter(f"{metrics} is a trace, which needs --{', --'.join(missing)}.")
        assert prefill_tokens_per_s is not None
        assert decode_tokens_per_s is not None
        assert itl_ms is not None
        speed = WorkerSpeed(
            prefill_tokens_per_s, decode_tokens_per_s, itl_ms / 1000, max_batch, kv_tokens, start_s
        )
        verdicts, note = _modelled(
            rules, metrics, speed, (prefill, decode), prompt_tokens, output_tokens
        )
    if not verdicts:
        raise typer.BadParameter(f"{policy} has no policy for a pool that {metrics} is about.")
    if as_json:
        print(json.dumps({"note": note, "verdicts": [_json(one) for one in verdicts]}))
    else:
        console().print(explain_view(verdicts, note))


def _is_record(file: Path) -> bool:
    """Whether it holds metrics, and not requests. Raises BadParameter for a file that cannot be
    read.
    """
    if file.is_dir():
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline(4096)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from error
    return '"format"' in first[:200] or first.startswith("seconds,")


def _replayed(rules: AutoscalingPolicy, file: Path) -> list[Verdict]:
    from autoscaler.replay import Replay
    from kvrelay.loadtest.recording import moments_of, read_moments
    from kvrelay.loadtest.report.report_file import load_report

    moments = read_moments(file) if file.suffix == ".csv" else moments_of(load_report(file))
    replay = Replay(rules)
    return [verdict for moment in moments for verdict in replay.decide(moment)]


def _modelled(
    rules: AutoscalingPolicy,
    file: Path,
    speed: WorkerSpeed,
    sizes: tuple[int, int],
    prompt_tokens: str,
    output_tokens: str,
) -> tuple[list[Verdict], str]:
    from autoscaler.queueing_model import QueueingModel
    from autoscaler.replay import Moment, Replay
    from kvrelay.loadtest.lengths import parse_lengths
    from kvrelay.loadtest.traces.trace_load import read_load, span

    lengths = (
        parse_lengths(prompt_tokens, "prompt_tokens"),
        parse_lengths(output_tokens, "output_tokens"),
    )
    seconds = span(file, *lengths)
    interval = max(rules.interval_s, seconds / _LOOKS)
    cluster, replay = QueueingModel(speed, *sizes), Replay(rules)
    verdicts = []
    loads = track(
        read_load(file, interval, *lengths),
        "replay",
        seconds / interval,
        console=Console(stderr=True),
        transient=True,
    )
    for index, load in enumerate(loads, 1):
        pools = cluster.step(load, interval)
        for verdict in replay.decide(Moment(index * interval, pools)):
            cluster.resize(verdict.pool, verdict.after)
            verdicts.append(verdict)
    return verdicts, f"metrics of a model of the pools, one look each {interval:.3g} s"


def _json(verdict: Verdict) -> dict[str, object]:
    return {
        "seconds": verdict.at,
        "pool": verdict.pool,
        "before": verdict.before,
        "after": verdict.after,
        "reason": verdict.reason,
        "ready": verdict.seen.ready,
        "metrics": dict(verdict.seen.metrics),
    }
