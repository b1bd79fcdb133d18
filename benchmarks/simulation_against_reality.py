"""Runs unlike loads on a real local cluster and simulates the same loads, and prints the errors:
`python benchmarks/simulation_against_reality.py --profile profile.json --out FOLDER`.

Without --profile, a profile is fitted first. Two more loads then calibrate the simulation: on a
prefill and a decode worker, and on two decode workers. Their reports are FOLDER/calibration-1.json
and FOLDER/calibration-2.json. The requests of a real and a simulated run are equal: lengths, token
ids, seeds and times. FOLDER/CASE-real.json and FOLDER/CASE-simulated.json are reports for `kvrelay
loadtest compare`. Run nothing else on the machine. The exit code is 1 if an error is above
--limit-p50 or --limit-p99.

With --decisions, each load runs with a second prefill worker and with a second decode worker, and
the table shows which of the two has the lower median of E2E, really and simulated.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvrelay.bench.profiling.run import Options, run
from kvrelay.client.admin import AdminClient
from kvrelay.client.connection import Connection
from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.lengths import parse_lengths
from kvrelay.loadtest.measure import Run, measure
from kvrelay.loadtest.rate import Rate, Stage, constant
from kvrelay.loadtest.report.report_file import load_report, save
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.senders.target import open_target
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import PlannedRequest, Workload
from kvrelay.planning.profile import Profile
from kvrelay.simulation.calibration import Calibration, calibrate
from kvrelay.simulation.scenario import Failure, Scenario
from kvrelay.simulation.simulation import simulate

TIMEOUT_S = 600.0
POLICY = Path(__file__).parents[1] / "configs" / "autoscaling" / "queue-depth.yaml"

log = Console(stderr=True, width=120)


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `share`: the rate as a share of the capacity that the profile predicts."""

    name: str
    prompt_tokens: str
    output_tokens: str
    share: float = 0.5
    # Tokens that all prompts begin with.
    shared: int = 0
    # The rate is multiplied by this in the middle third, and the pools scale.
    step: float = 1.0
    # A decode worker dies after this share of the test.
    kill: float | None = None
    prefill: int = 1
    decode: int = 1


CASES = (
    Case("long-prompts", "lognormal:median=800,sigma=0.4,min=200,max=1600", "4-16"),
    Case("long-answers", "16-96", "96-192"),
    Case("mixed", "lognormal:median=300,sigma=0.8,min=32,max=1500", "16-64"),
    Case("shared-prefix", "64-256", "16-64", shared=768),
    Case("step", "200-600", "8-24", share=0.2, step=10.0),
    Case("killed", "100-400", "32-96", share=0.3, kill=0.4, decode=2),
)

# Unlike the loads above: what they tell of the cluster has to hold for others.
CALIBRATION = (
    Case("calibration-1", "32-800", "16-96", share=0.5),
    Case("calibration-2", "32-400", "32-96", share=0.5, prefill=0, decode=2),
)

# Loads of the decisions, and their rate as a share of what one worker of each pool can take.
DECISIONS = ("long-prompts", "long-answers", "mixed")
DECISION_SHARE = 0.7


def capacity(case: Case, profile: Profile, config: ClusterConfig) -> float:
    """Returns the requests per second that the slower pool of the cluster serves, by the profile:
    means only.
    """
    prompt = parse_lengths(case.prompt_tokens, "prompt_tokens").mean
    answer = parse_lengths(case.output_tokens, "output_tokens").mean
    costs, batch = profile.costs, config.decode.max_batch
    chunk = config.prefill.chunk_tokens
    prefill_s = costs.prompt_s(round(prompt) + 1, chunk, case.shared)
    step_s = costs.decode_s(batch, batch * (case.shared + prompt + answer / 2))
    answer_s = step_s / batch * max(1.0, answer - 1)
    if not case.prefill:
        return case.decode / (prefill_s + answer_s)
    return min(case.prefill / prefill_s, case.decode / answer_s)


def plan_of(case: Case, rate: float, requests: int, vocab_size: int, seed: int) -> Workload:
    """Returns the load at this rate."""
    third = requests / (rate * (2 + case.step))
    stages: Rate = constant(rate)
    if case.step != 1.0:
        calm = Stage(rate, rate, third)
        stages = (calm, Stage(case.step * rate, case.step * rate, third), calm)
    return Workload(
        rate=stages,
        burstiness=1.0,
        num_requests=requests,
        duration=None,
        prompt_tokens=parse_lengths(case.prompt_tokens, "prompt_tokens"),
        output_tokens=parse_lengths(case.output_tokens, "output_tokens"),
        text=False,
        seed=seed,
    )


def planned(case: Case, load: Workload, vocab_size: int) -> list[PlannedRequest]:
    """Returns the requests, with the shared prefix."""
    random = Random(load.seed)
    prefix = tuple(random.choices(range(vocab_size), k=case.shared))
    return [
        replace(one, token_ids=prefix + one.token_ids)
        for one in load.plan(vocab_size)
        if one.token_ids is not None
    ]


def config_of(case: Case, model: str) -> ClusterConfig:
    """Returns the configuration of the cluster, real and simulated."""
    wanted: dict[str, object] = {
        **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
        "model.path": model,
        "prefill.replicas": case.prefill,
        "decode.replicas": case.decode,
        "decode.max_batch": 16,
        "kv.memory": "256MiB",
    }
    if case.step != 1.0:
        wanted["autoscaling"] = str(POLICY)
    return load_config(None, wanted)


async def real(
    case: Case,
    config: ClusterConfig,
    plan: list[PlannedRequest],
    options: dict[str, Any],
    slos: tuple[Slo, ...],
) -> Report:
    """Runs the load on a local cluster."""
    async with (
        LocalCluster(config, quiet=True) as cluster,
        open_target(
            cluster.endpoints.grpc,
            TIMEOUT_S,
            cluster.endpoints.admin,
            None,
            Connection(None, None, None, None),
        ) as target,
    ):
        assert target.admin is not None
        # The first requests open connections.
        warm = [replace(one, at=0.0, output_tokens=2) for one in plan[:2]]
        warm = [
            one.variant(1, 10**6 if not target.model.vocab_size else target.model.vocab_size)
            for one in warm
        ]
        await measure(target, Run(warm, {}, ()), lambda _: None, asyncio.Event())
        killer = None
        if case.kill is not None:
            killer = asyncio.create_task(_kill(target.admin, plan[-1].at * case.kill))
        try:
            return await measure(target, Run(plan, options, slos), lambda _: None, asyncio.Event())
        finally:
            if killer is not None:
                killer.cancel()
                with suppress(asyncio.CancelledError):
                    await killer


async def _kill(admin: AdminClient, after_s: float) -> None:
    """Kills the process of a decode worker of this cluster."""
    await asyncio.sleep(after_s)
    status = await asyncio.to_thread(admin.status)
    victim = next(
        worker for pool in status.pools for worker in pool.workers if worker.pool == "decode"
    )
    os.kill(victim.pid, signal.SIGKILL)


def simulated(
    case: Case,
    config: ClusterConfig,
    profile: Profile,
    plan: list[PlannedRequest],
    options: dict[str, Any],
    slos: tuple[Slo, ...],
    calibration: Calibration,
    cores: int,
) -> Report:
    """Simulates the load."""
    failures = () if case.kill is None else (Failure("decode-0", plan[-1].at * case.kill),)
    scenario = Scenario(
        config,
        {
            "prefill": (profile,) * config.prefill.replicas,
            "decode": (profile,) * config.decode.replicas,
        },
        load_policy(Path(config.autoscaling)) if config.autoscaling else None,
        failures,
        calibration.delays,
        cores=cores,
        times=calibration.times,
    )
    return simulate(scenario, plan, options, slos)


# What is compared: the name, the value of a report, and whether a limit of p50 or of p99 applies.
Value = Callable[[Report], float | None]


def _latency(name: str, column: str) -> Value:
    def value(report: Report) -> float | None:
        summary = report.latencies()[name]
        return None if summary is None else float(getattr(summary, column))

    return value


def _cached(report: Report) -> float | None:
    tokens = sum(row.prompt_tokens for row in report.answered)
    return sum(row.cached_tokens for row in report.answered) / tokens if tokens else None


FIGURES: tuple[tuple[str, Value, bool], ...] = (
    *(
        (f"{name} {label}", _latency(name, column), column == "p99")
        for name in ("TTFT", "ITL", "E2E")
        for label, column in (("p50", "median"), ("p99", "p99"))
    ),
    ("cache hit rate", _cached, False),
    ("goodput/s", lambda report: report.rates().get("goodput requests"), False),
)


def errors(case: str, reality: Report, model: Report) -> Iterator[tuple[str, ...]]:
    """Yields case, figure, real and simulated value, the relative error, and the kind of limit. A
    hit rate's error is in points.
    """
    for name, value, is_tail in FIGURES:
        one, other = value(reality), value(model)
        if one is None or other is None:
            continue
        difference = other - one if name == "cache hit rate" else (other / one - 1 if one else 0.0)
        scale = 1000 if name[:3] in ("TTF", "ITL", "E2E") else 1
        yield (
            case,
            name,
            f"{scale * one:.3g}",
            f"{scale * other:.3g}",
            f"{difference:+.1%}",
            "p99" if is_tail else "p50",
        )


def _recorded(
    case: Case, config: ClusterConfig, profile: Profile, requests: int, seed: int, out: Path
) -> Path:
    """Runs a load on a local cluster and returns the file of its report."""
    rate = case.share * capacity(case, profile, config)
    load = plan_of(case, rate, requests, profile.vocab_size, seed)
    log.print(f"{case.name}: {rate:.2f} requests/s")
    plan = planned(case, load, profile.vocab_size)
    report = asyncio.run(real(case, config, plan, {"case": case.name, **load.options()}, ()))
    file = out / f"{case.name}.json"
    save(report, file)
    return file


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs loads on a local cluster and in the simulation."""

    model: str
    profile: Profile
    calibration: Calibration
    cores: int
    requests: int
    seed: int
    # Folder for the reports.
    out: Path

    def run(self, case: Case, rate: float) -> tuple[Report, Report] | None:
        """Returns the reports of both, or None if the cluster failed: the other loads count."""
        found = self.profile
        config = config_of(case, self.model)
        load = plan_of(case, rate, self.requests, found.vocab_size, self.seed)
        plan = planned(case, load, found.vocab_size)
        # Objectives that some requests miss: three times an unloaded request.
        lone = found.costs.prompt_s(600, 512) + found.costs.decode_s(8, 4000)
        slos = (Slo("ttft", 3000 * lone), Slo("tpot", 1500 * found.costs.decode_s(8, 4000)))
        options = {"model": self.model, "case": case.name, **load.options()}
        log.print(f"{case.name}: {rate:.2f} requests/s")
        model = simulated(
            case,
            config,
            found,
            plan,
            {"target": "simulation", **options},
            slos,
            self.calibration,
            self.cores,
        )
        save(model, self.out / f"{case.name}-simulated.json")
        try:
            reality = asyncio.run(real(case, config, plan, {"target": "cluster", **options}, slos))
        except KvRelayError as error:
            log.print(f"{case.name}: the cluster failed: {error.message}")
            return None
        save(reality, self.out / f"{case.name}-real.json")
        return reality, model


def compare_figures(
    comparison: Comparison, cases: Sequence[Case], limit_p50: float, limit_p99: float
) -> bool:
    """Prints the errors of each load. Returns whether all are within the limits."""
    table = Table(title="milliseconds where latencies; errors relative, of hit rates in points")
    for column in ("load", "figure", "real", "simulated", "error", "limit"):
        table.add_column(column)
    limits = {"p50": limit_p50, "p99": limit_p99}
    figures = missed = failed = 0
    for case in cases:
        rate = case.share * capacity(case, comparison.profile, config_of(case, comparison.model))
        reports = comparison.run(case, rate)
        if reports is None:
            failed += 1
            continue
        for row in errors(case.name, *reports):
            wrong = abs(float(row[4].rstrip("%")) / 100) > limits[row[5]]
            figures += 1
            missed += wrong
            table.add_row(*row[:5], "above" if wrong else "within")
    Console(width=110).print(table)
    print(f"{figures - missed} of {figures} figures are within the limits")
    return not missed and not failed


def compare_decisions(comparison: Comparison, cases: Sequence[Case]) -> bool:
    """Prints whether another prefill or another decode worker helps each load more, by the median
    of E2E. Returns whether the simulation and the cluster agree on all.
    """
    table = Table(title="median E2E in ms with another prefill or decode worker; better is *")
    for column in ("load", "real 2 + 1", "real 1 + 2", "simulated 2 + 1", "simulated 1 + 2", ""):
        table.add_column(column)
    agreed = 0
    for case in cases:
        # As much as one worker of each pool can take.
        rate = capacity(case, comparison.profile, config_of(case, comparison.model))
        medians: list[list[float]] = [[], []]
        for prefill, decode in ((2, 1), (1, 2)):
            name = f"{case.name}-{prefill}-{decode}"
            reports = comparison.run(
                replace(case, name=name, prefill=prefill, decode=decode), DECISION_SHARE * rate
            )
            for found, report in zip(medians, reports or (), strict=False):
                summary = report.latencies()["E2E"]
                found.append(1000 * summary.median if summary is not None else math.inf)
        better = {found.index(min(found)) for found in medians if len(found) == 2}
        agrees = len(better) == 1
        agreed += agrees
        cells = [
            f"{value:.0f}{' *' if value == min(found) else ''}"
            for found in medians
            for value in found
        ]
        table.add_row(case.name, *cells, "agree" if agrees else "differ")
    Console(width=110).print(table)
    return agreed == len(cases)


def main(
    model: Annotated[str, typer.Option(help="Model: a folder, a hub id, or demo.")] = "demo",
    profile: Annotated[
        Path | None, typer.Option(help="Profile to use. Default: fit one first.")
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each load.")] = 150,
    case: Annotated[
        list[str] | None, typer.Option(help="Load to run; repeatable. Default: all.")
    ] = None,
    calibrate_with: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibrate", help="Report of a load test to calibrate with; repeatable. Default: run."
        ),
    ] = None,
    decisions: Annotated[
        bool,
        typer.Option("--decisions", help="Compare which pool should grow instead of latencies."),
    ] = False,
    seed: int = 0,
    limit_p50: Annotated[float, typer.Option(help="Largest error of a median.")] = 0.05,
    limit_p99: Annotated[float, typer.Option(help="Largest error of a p99.")] = 0.15,
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("simulation"),
) -> None:
    """Compare simulations with a local cluster under the same loads."""
    known = {one.name: one for one in CASES}
    if unknown := set(case or ()) - known.keys():
        raise typer.BadParameter(f"--case {unknown.pop()}: allowed are {', '.join(known)}.")
    out.mkdir(parents=True, exist_ok=True)
    if profile is None:
        log.print("fitting the profile")
        fitted = run(Options(model, max_batch=16), lambda _text, _total: lambda: None)
        profile = out / "profile.json"
        profile.write_text(json.dumps(fitted.to_json(), indent=1))
    found = Profile.parse(profile.read_text())
    recorded = calibrate_with or [
        _recorded(one, config_of(one, model), found, requests, seed + 1, out) for one in CALIBRATION
    ]
    chunk_tokens = config_of(CALIBRATION[0], model).prefill.chunk_tokens
    tests = {str(one): load_report(one) for one in recorded}
    calibration = calibrate(tests, found.costs, chunk_tokens)
    cores = len(os.sched_getaffinity(0))
    comparison = Comparison(model, found, calibration, cores, requests, seed, out)
    if decisions:
        cases = [known[name] for name in case or DECISIONS]
        fine = compare_decisions(comparison, cases)
    else:
        cases = [known[name] for name in case or known]
        fine = compare_figures(comparison, cases, limit_p50, limit_p99)
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    typer.run(main)
