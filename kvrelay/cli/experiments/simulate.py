"""`kvrelay simulate`: a cluster in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.loadtest import options
from kvrelay.cli.loadtest.result_files import write_results
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views import render
from kvrelay.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from kvrelay.loadtest.report.sweep_report import Report
    from kvrelay.loadtest.slo import Slo
    from kvrelay.planning.profile import Profile
    from kvrelay.simulation.calibration import Calibration
    from kvrelay.simulation.options import Point, PoolPart
    from kvrelay.simulation.scenario import Delays, Failure, Scenario
    from kvrelay.simulation.sweep import SweepPoint

# Characters of a profile that are read.
_MAX_PROFILE = 2**20

Pool = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[:PROFILE]",
        help="Workers of the pool. Repeat it with other profiles for unlike workers. Default: as "
        "configured.",
    ),
]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The options, parsed but not yet checked against each other."""

    profile: Path | None
    kv_token_bytes: int | None
    config: Path | None
    # The name of one of the file's models; empty for the only one.
    model: str
    autoscaling: Path | None
    prefill: tuple[PoolPart, ...]
    decode: tuple[PoolPart, ...]
    failures: tuple[Failure, ...]
    routers: int
    cores: int | None
    calibration: Calibration
    # None: as calibrated, or the default.
    request_ms: float | None
    message_ms: float | None
    step_ms: float | None
    load: options.Load
    slos: tuple[Slo, ...]


@requires_cluster_extra
def simulate(
    slo: options.Words = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Profile of every worker, as `kvrelay profile` writes it."
        ),
    ] = None,
    kv_token_bytes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="KV bytes per token, for step costs without it."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="Configuration file.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the model, if the file has several."),
    ] = "",
    autoscaling: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Scaling policy. Default: as configured."),
    ] = None,
    prefill: Pool = None,
    decode: Pool = None,
    rate: options.RateStages = None,
    num_requests: options.NumRequests = None,
    duration: options.Duration = None,
    burstiness: options.Burstiness = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    seed: Annotated[
        int,
        typer.Option(metavar="S", help="Seed; equal seeds give equal simulations."),
    ] = 0,
    trace: options.Trace = None,
    trace_format: options.TraceFormat = None,
    trace_start: options.TraceStart = 0.0,
    time_scale: options.TimeScale = "1",
    length_scale: options.LengthScale = "1",
    fail: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER@SECONDS", help="Kill a worker at a time; repeatable."),
    ] = None,
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Independent routers, each with an equal share of the workers and requests.",
        ),
    ] = 1,
    cores: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="Cores of the one machine that all workers share. Default: a machine for each.",
        ),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Report of `kvrelay loadtest run` on a real cluster, for delays and step times; "
            "repeatable.",
        ),
    ] = None,
    request_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e4,
            metavar="MS",
            help="Time from the client to the queue. Default: as calibrated, or 1.",
        ),
    ] = None,
    message_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e4,
            metavar="MS",
            help="Time of a message between processes. Default: as calibrated, or 0.5.",
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e4,
            metavar="MS",
            help="Time of a worker between two steps. Default: 0; a calibration has it in the "
            "times of the steps.",
        ),
    ] = None,
    goodput: options.Goodput = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V,...",
            help="Simulate all combinations. KEY: pools (P:D), rate, or a configuration key.",
        ),
    ] = None,
    file: options.Json = None,
    html: options.Html = None,
) -> None:
    """Simulate a cluster under a load, with the production router, schedulers and autoscaler in
    virtual time.

    Step times come from a profile of a worker. The report has the format of `kvrelay loadtest
    run`, so `kvrelay loadtest report` and `compare` accept it. Exits with 1 if the cluster cannot
    serve any request.

    Example: kvrelay simulate --profile m.json --prefill 2 --decode 4 --rate 8 --num-requests 1000
    --goodput ttft:500 tpot:50 --json run.json

    Example: kvrelay simulate --profile m.json --rate 8 --num-requests 1000 --goodput ttft:500
    --sweep pools=1:3,2:2,3:1 --sweep prefill.chunk_tokens=256,512 --html sweep.html
    """
    from kvrelay.simulation.options import parse_failures, parse_pool, parse_sweep

    options.can_be_written(file, html)
    if trace is not None:
        exclusive = {"--rate": rate, "--burstiness": burstiness}
        options.exclude("--trace", exclusive, "the trace sets the times; use --time-scale")
        shape = (trace, trace_format, trace_start, time_scale, length_scale, num_requests, duration)
        with _failures_exit():
            load: options.Load = options.replay(*shape, prompt_tokens, output_tokens, seed)
    else:
        options.require_trace(trace_format, trace_start, time_scale, length_scale)
        lengths = (prompt_tokens, output_tokens, False, seed)
        load = options.workload(rate, None, burstiness, num_requests, duration, *lengths)
    with _failures_exit():
        calibration = _calibration(calibrate or (), profile, kv_token_bytes, config, model, cores)
    for text in calibration.notes:
        note(f"calibration: {text}")
    inputs = _Inputs(
        profile=profile,
        kv_token_bytes=kv_token_bytes,
        config=config,
        model=model,
        autoscaling=autoscaling,
        prefill=parse_pool(prefill or (), "--prefill"),
        decode=parse_pool(decode or (), "--decode"),
        failures=parse_failures(fail or ()),
        routers=routers,
        cores=cores,
        calibration=calibration,
        request_ms=request_ms,
        message_ms=message_ms,
        step_ms=step_ms,
        load=load,
        slos=options.objectives(goodput, slo),
    )
    points = parse_sweep(sweep or ())
    with _failures_exit():
        if sweep:
            _sweep(inputs, points, file, html)
        else:
            _single(inputs, points[0], file, html)


@contextmanager
def _failures_exit() -> Iterator[None]:
    """Raises FailedPrecondition for input that is well-formed on the command line and cannot be
    simulated.
    """
    try:
        yield
    except InvalidArgument as error:
        raise FailedPrecondition(error.message) from error


def _single(inputs: _Inputs, point: Point, file: Path | None, html: Path | None) -> None:
    from kvrelay.loadtest.html_report import page
    from kvrelay.loadtest.report.report_file import save, write
    from kvrelay.loadtest.report.tables import report_table

    report = _run(inputs, point)
    render.console().print(report_table(report))
    all_saved = write_results(
        (file, lambda path: save(report, path)), (html, lambda path: write(path, page(report)))
    )
    _note_late_failures(inputs, report)
    if not report.answered:
        first = report.rows[0].message if report.rows else "no request ended"
        raise InvalidArgument(f"no request was answered; the first: {first}")
    if not all_saved:
        raise typer.Exit(1)


def _note_late_failures(inputs: _Inputs, report: Report) -> None:
    end_s = report.options["simulated_seconds"]
    for one in inputs.failures:
        if one.at_s > end_s:
            note(
                f"--fail {one.worker_id}@{one.at_s:g}: the simulation ended after {end_s:.4g} s, "
                "so the worker was not killed"
            )


def _sweep(
    inputs: _Inputs, points: tuple[Point, ...], file: Path | None, html: Path | None
) -> None:
    from kvrelay.cli.views.simulation_view import sweep_view
    from kvrelay.loadtest.html_report import pareto_page
    from kvrelay.loadtest.report.report_file import write
    from kvrelay.simulation.sweep import SweepPoint, sweep_to_json

    for point in points:
        # A wrong value is found before the first simulation.
        _prepared(inputs, point)
    found: list[SweepPoint] = []
    best: tuple[float, Report] | None = None
    for number, point in enumerate(points, 1):
        report = _run(inputs, point, f"{number} of {len(points)}: {point.name}")
        one = SweepPoint.of(point.name, point.values, report)
        found.append(one)
        if best is None or one.goodput > best[0]:
            best = one.goodput, report
    out = render.console()
    out.print(sweep_view(found, out.width))
    document = sweep_to_json(found, {**inputs.load.options(), **_surroundings(inputs)})
    all_saved = write_results(
        (file, lambda path: write(path, json.dumps(document, allow_nan=False) + "\n")),
        (html, lambda path: write(path, pareto_page(document))),
    )
    if best is not None and not best[1].answered:
        raise InvalidArgument("no request was answered at any point of the sweep")
    if not all_saved:
        raise typer.Exit(1)


def _prepared(inputs: _Inputs, point: Point) -> tuple[options.Load, Scenario]:
    """Returns the load and the cluster of a point. Raises InvalidArgument."""
    from kvrelay.loadtest.rate import parse_rate
    from kvrelay.loadtest.workload import Workload

    load, rate = inputs.load, point.get("rate")
    if rate is not None:
        if not isinstance(load, Workload):
            raise InvalidArgument("--sweep rate cannot be combined with --trace")
        load = replace(load, rate=parse_rate(rate))
    scenario = _scenario(inputs, point)
    if isinstance(load, Workload) and load.prompt_tokens.low >= scenario.max_model_len:
        raise InvalidArgument(
            f"--prompt-tokens {load.prompt_tokens}: no prompt fits into the context of "
            f"{scenario.max_model_len} tokens with an answer"
        )
    return load, scenario


def _run(inputs: _Inputs, point: Point, text: str = "simulated requests") -> Report:
    from kvrelay.cli.views.simulation_view import simulation_progress
    from kvrelay.loadtest.traces.replay import Replay
    from kvrelay.simulation.simulation import simulate as run

    load, scenario = _prepared(inputs, point)
    sizes = ", ".join(f"{len(scenario.pools[pool])} {pool}" for pool in scenario.pools)
    described: dict[str, Any] = {
        "target": "simulation",
        "model": _names(scenario),
        "pools": sizes,
        **load.options(),
        **_surroundings(inputs),
        **dict(point.values),
    }
    if isinstance(load, Replay):
        described["cut"] = asdict(load.cut(scenario.max_model_len))
    total = getattr(load, "num_requests", None)
    plan = load.plan(scenario.vocab_size, scenario.max_model_len)
    with simulation_progress(text, total) as done:
        return run(scenario, plan, described, inputs.slos, done)


def _surroundings(inputs: _Inputs) -> dict[str, Any]:
    """Returns what the simulation assumes beside the profile, for the report."""
    found: dict[str, Any] = {} if inputs.cores is None else {"cores": inputs.cores}
    if inputs.calibration.notes:
        found["calibration"] = list(inputs.calibration.notes)
    return found


def _scenario(inputs: _Inputs, point: Point) -> Scenario:
    from kvrelay.config.config_file import load_one_model, load_policy
    from kvrelay.simulation.options import PoolPart, parse_ratio
    from kvrelay.simulation.scenario import Scenario

    of_model = {"model.path": inputs.model} if inputs.model else {}
    loaded = load_one_model(inputs.config, {**of_model, **point.overrides()})
    policy_file = inputs.autoscaling or (Path(loaded.autoscaling) if loaded.autoscaling else None)
    parts = {
        "prefill": inputs.prefill or (PoolPart(loaded.prefill.replicas),),
        "decode": inputs.decode or (PoolPart(loaded.decode.replicas),),
    }
    ratio = point.get("pools")
    if ratio is not None:
        if any(one.profile for kinds in parts.values() for one in kinds):
            raise InvalidArgument("--sweep pools cannot be combined with N:PROFILE")
        sizes = parse_ratio(ratio)
        parts = {"prefill": (PoolPart(sizes[0]),), "decode": (PoolPart(sizes[1]),)}
    profiles: dict[str, Profile] = {}
    return Scenario(
        config=loaded,
        pools={
            "prefill": _profiles(inputs, parts["prefill"], profiles),
            "decode": _profiles(inputs, parts["decode"], profiles),
        },
        policy=None if policy_file is None else load_policy(policy_file),
        failures=inputs.failures,
        delays=_delays(inputs, inputs.calibration.delays),
        routers=inputs.routers,
        cores=inputs.cores,
        times=inputs.calibration.times,
    )


def _calibration(
    files: Sequence[Path],
    profile: Path | None,
    kv_token_bytes: int | None,
    config: Path | None,
    model: str,
    cores: int | None,
) -> Calibration:
    """Returns what the recorded load tests show. Without any, the defaults."""
    from kvrelay.config.config_file import load_one_model
    from kvrelay.loadtest.report.report_file import load_report
    from kvrelay.simulation.calibration import Calibration, calibrate

    if not files:
        return Calibration()
    if profile is None:
        raise typer.BadParameter(
            "--calibrate needs the profile of the recorded workers; give --profile FILE."
        )
    costs = _read_profile(str(profile), kv_token_bytes).costs
    loaded = load_one_model(config, {"model.path": model} if model else {})
    tests = {str(file): load_report(file) for file in files}
    return calibrate(tests, costs, loaded.prefill.chunk_tokens, cores)


def _delays(inputs: _Inputs, found: Delays) -> Delays:
    """Returns the delays with the values of the options."""
    given = {
        "request_s": inputs.request_ms,
        "message_s": inputs.message_ms,
        "step_s": inputs.step_ms,
    }
    return replace(found, **{name: ms / 1000 for name, ms in given.items() if ms is not None})


def _profiles(
    inputs: _Inputs, parts: tuple[PoolPart, ...], read: dict[str, Profile]
) -> tuple[Profile, ...]:
    """Returns the profile of each worker of a pool. `read` holds the files that were read."""
    found: list[Profile] = []
    for part in parts:
        if not part.count:
            continue
        name = part.profile or (str(inputs.profile) if inputs.profile is not None else "")
        if name not in read:
            read[name] = _read_profile(name, inputs.kv_token_bytes)
        found += [read[name]] * part.count
    return tuple(found)


def _read_profile(name: str, kv_token_bytes: int | None) -> Profile:
    from kvrelay.planning.profile import Profile

    if not name:
        raise typer.BadParameter(
            "a worker has no profile; give --profile FILE, which `kvrelay profile` writes."
        )
    try:
        with Path(name).open(encoding="utf-8") as lines:
            text = lines.read(_MAX_PROFILE)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidArgument(f"{name:.200}: {reason}") from None
    try:
        return Profile.parse(text, kv_token_bytes)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name:.200}: {error.message}") from None


def _names(scenario: Scenario) -> str:
    names = {one.costs.model or "a model" for pool in scenario.pools.values() for one in pool}
    return ", ".join(sorted(names))
