"""`kvrelay autoscale`: evaluates a scaling policy offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

from kvrelay.cli.options.output import PrintJson
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.help_page import App
from kvrelay.planning.quantity import plain
from kvrelay.types.workers import POOLS

if TYPE_CHECKING:
    from autoscaler.queueing_model import WorkerSpeed
    from autoscaler.replay import Verdict
    from kvrelay.config.autoscaling_policy import AutoscalingPolicy

# Most evaluations of the policy over a trace.
_MAX_EVALUATIONS = 50_000

app = App(
    help="Evaluate a scaling policy.",
    epilog="Example: kvrelay autoscale explain configs/autoscaling/queue-depth.yaml --metrics "
    "run.json",
)


@app.callback()
def group() -> None:
    """Evaluate a scaling policy."""
    # Without a callback, typer would make the only command of the app the app itself.


@app.command()
@requires_cluster_extra
def explain(
    policy: Annotated[
        Path, typer.Argument(help="Policy file, as named by `autoscaling` in the configuration.")
    ],
    metrics: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="JSON of a load test, CSV of metrics, or a trace (see below)."
        ),
    ],
    prefill: Annotated[
        int, typer.Option(min=0, metavar="N", help="Initial number of prefill workers.")
    ] = 1,
    decode: Annotated[
        int, typer.Option(min=1, metavar="N", help="Initial number of decode workers.")
    ] = 1,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3, metavar="N", help="Throughput of one prefill worker. Required for a trace."
        ),
    ] = None,
    decode_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="N",
            help="Throughput of one decode worker with a full batch. Required for a trace.",
        ),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="MS",
            help="Inter-token latency of a single sequence. Required for a trace.",
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="Batch slots of one decode worker.")
    ] = 32,
    kv_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="KV capacity of one decode worker, in tokens.")
    ] = 65536,
    start_s: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Start-up time of a worker.")
    ] = 10.0,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="DIST", help="Prompt lengths of ServeGen clients that record no lengths."
        ),
    ] = "1024",
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="DIST", help="Answer lengths of ServeGen clients that record no lengths."
        ),
    ] = "256",
    as_json: PrintJson = False,
) -> None:
    """Replay recorded metrics or a trace through a policy. Shows each size that the policy would
    set, with time and reason.

    FILE is one of:

    - Recorded metrics: the JSON of `kvrelay loadtest run --admin ... --json`, or a CSV with the
    columns seconds, pool, size, ready, the metrics of the policy, and busy_share (0 to 1). Without
    busy_share, no rule about busy workers keeps a pool from shrinking. The metrics do not react to
    the sizes.

    - A trace: Azure CSV, Mooncake JSONL, or a ServeGen folder of rates. A queueing model of the
    pools computes the metrics, so that they react to the sizes. `kvrelay bench engine` measures the
    parameters of the model.

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
                f"--{wrong[0]} applies to traces, and {metrics} contains recorded metrics; leave "
                "it out."
            )
        verdicts = _replayed(rules, metrics)
        note = f"recorded metrics{_without_busy_share(verdicts)}"
    else:
        if missing := [name for name, value in given.items() if value is None]:
            raise typer.BadParameter(f"{metrics} is a trace; give --{', --'.join(missing)}.")
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
        raise typer.BadParameter(
            f"{policy} has no policy for any pool in {metrics}; add one for prefill or decode."
        )
    note += _without_slo(rules)
    if as_json:
        print(json.dumps({"note": note, "verdicts": [_json(one) for one in verdicts]}))
    else:
        console().print(explain_view(verdicts, note))


def _is_record(file: Path) -> bool:
    """Whether the file contains recorded metrics rather than requests. Raises BadParameter if it
    cannot be read.
    """
    if file.is_dir():
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline(4096)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}.") from error
    return '"format"' in first[:200] or first.startswith("seconds,")


def _replayed(rules: AutoscalingPolicy, file: Path) -> list[Verdict]:
    from autoscaler.replay import Replay
    from kvrelay.loadtest.recording import moments_of, read_moments
    from kvrelay.loadtest.report.report_file import load_report

    moments = read_moments(file) if file.suffix == ".csv" else moments_of(load_report(file))
    replay = Replay(rules)
    return [verdict for moment in moments for verdict in replay.decide(moment)]


def _without_busy_share(verdicts: list[Verdict]) -> str:
    """Returns a remark on the pools whose utilisation is not recorded, or an empty text."""
    pools = sorted({one.pool for one in verdicts if one.seen.busy_share is None and one.seen.ready})
    if not pools:
        return ""
    return (
        f", some without busy_share of {' and '.join(pools)}: in a cluster, busy workers may keep "
        "a pool from shrinking"
    )


def _without_slo(rules: AutoscalingPolicy) -> str:
    """Returns a remark on pools whose metric slo was left out, or an empty text."""
    pools = [
        pool
        for pool in POOLS
        if (section := rules.pool(pool)) is not None
        and any(one.name == "slo" for one in section.metrics)
    ]
    if not pools:
        return ""
    return (
        f"; without the metric slo of {' and '.join(pools)}, which `kvrelay simulate "
        "--autoscaling` knows"
    )


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
    interval = max(rules.interval_s, seconds / _MAX_EVALUATIONS)
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
    return verdicts, f"metrics of the queueing model, evaluated every {plain(interval, 3)} s"


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
