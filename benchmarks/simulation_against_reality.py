"""Runs unlike loads on a real local cluster and simulates the same loads, and prints the errors:
`python benchmarks/simulation_against_reality.py --profile profile.json --out FOLDER`.

Without --profile, a profile is fitted first. The requests of both are equal: lengths, token ids,
seeds and times. FOLDER/CASE-real.json and FOLDER/CASE-simulated.json are reports for `kvrelay
loadtest compare`. Run nothing else on the machine. The exit code is 1 if an error is above
--limit-p50 or --limit-p99.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
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
from kvrelay.loadtest.report.report_file import save
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.senders.target import open_target
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import PlannedRequest, Workload
from kvrelay.planning.profile import Profile
from kvrelay.simulation.scenario import Delays, Failure, Scenario
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
    decode: int = 1


CASES = (
    Case("long-prompts", "lognormal:median=800,sigma=0.4,min=200,max=1600", "4-16"),
    Case("long-answers", "16-96", "96-192"),
    Case("mixed", "lognormal:median=300,sigma=0.8,min=32,max=1500", "16-64"),
    Case("shared-prefix", "64-256", "16-64", shared=768),
    Case("step", "200-600", "8-24", share=0.2, step=6.0),
    Case("killed", "100-400", "32-96", share=0.3, kill=0.4, decode=2),
)


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
    return min(1 / prefill_s, case.decode * batch / (step_s * max(1.0, answer - 1)))


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
    delays: Delays,
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
        delays,
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


def main(
    model: Annotated[str, typer.Option(help="Model: a folder, a hub id, or demo.")] = "demo",
    profile: Annotated[
        Path | None, typer.Option(help="Profile to use. Default: fit one first.")
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each load.")] = 150,
    case: Annotated[
        list[str] | None, typer.Option(help="Load to run; repeatable. Default: all.")
    ] = None,
    request_ms: Annotated[float, typer.Option(help="Time from the client to the queue.")] = 1.0,
    message_ms: Annotated[float, typer.Option(help="Time of a message.")] = 0.5,
    step_ms: Annotated[float, typer.Option(help="Time of a worker between two steps.")] = 0.0,
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
    delays = Delays(request_ms / 1000, message_ms / 1000, step_ms / 1000)
    rows: list[tuple[str, ...]] = []
    failed: list[str] = []
    for one in [known[name] for name in case] if case else CASES:
        config = config_of(one, model)
        rate = one.share * capacity(one, found, config)
        load = plan_of(one, rate, requests, found.vocab_size, seed)
        plan = planned(one, load, found.vocab_size)
        # Objectives that some requests miss: three times an unloaded request.
        lone = found.costs.prompt_s(600, 512) + found.costs.decode_s(8, 4000)
        slos = (Slo("ttft", 3000 * lone), Slo("tpot", 1500 * found.costs.decode_s(8, 4000)))
        options = {"model": model, "case": one.name, **load.options()}
        log.print(f"{one.name}: {rate:.2f} requests/s")
        model_report = simulated(
            one, config, found, plan, {"target": "simulation", **options}, slos, delays
        )
        save(model_report, out / f"{one.name}-simulated.json")
        try:
            reality = asyncio.run(real(one, config, plan, {"target": "cluster", **options}, slos))
        except KvRelayError as error:
            # The other loads still count.
            log.print(f"{one.name}: the cluster failed: {error.message}")
            failed.append(one.name)
            continue
        save(reality, out / f"{one.name}-real.json")
        rows += errors(one.name, reality, model_report)
    table = Table(title="milliseconds where latencies; errors relative, of hit rates in points")
    for column in ("load", "figure", "real", "simulated", "error", "limit"):
        table.add_column(column)
    limits = {"p50": limit_p50, "p99": limit_p99}
    missed = 0
    for row in rows:
        wrong = abs(float(row[4].rstrip("%")) / 100) > limits[row[5]]
        missed += wrong
        table.add_row(*row[:5], "above" if wrong else "within")
    Console(width=110).print(table)
    print(f"{len(rows) - missed} of {len(rows)} figures are within the limits")
    raise typer.Exit(1 if missed or failed else 0)


if __name__ == "__main__":
    typer.run(main)
