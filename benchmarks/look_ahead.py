"""Compares the scaling policies over a rising load and over days, in the simulation:
`python benchmarks/look_ahead.py --trace AzureLLMInferenceTrace_conv.csv`.

The lengths of the requests are the trace's, in its order; without a trace they are drawn. Arrivals
are a Poisson process whose rate rises linearly from a tenth of the peak to the peak and falls again
(ramp), or follows a sine between the two (day: two days, 24 times as fast). All policies get the
same requests and bounds, and workers that need --start-s seconds from a decision until they serve.
A policy is better if more requests meet the SLO for no more worker-seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvrelay.config.config_file import load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.traces.trace_azure import read_azure
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.percentiles import percentile
from kvrelay.planning.device import Efficiency, find_device
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.model_source import published
from kvrelay.planning.model_table import find_model
from kvrelay.planning.profile import Profile
from kvrelay.planning.roofline import Roofline
from kvrelay.simulation.scenario import Scenario
from kvrelay.simulation.simulation import simulate

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "autoscaling"
POLICIES = ("queue-depth", "slo", "look-ahead")
MODEL, DEVICE, KV_MEMORY = "llama-3.1-8b", "a100", "40GiB"
TTFT_MS, ITL_MS = 1000.0, 50.0
MOST_WORKERS = 16
LOW = 0.1
DAY_S, RAMP_S, FLAT_S = 3600.0, 600.0, 300.0
Lengths = list[tuple[int, int]]


def ramp(second: float) -> float | None:
    """Returns the share of the peak rate at a second of the ramp; None after its end."""
    ends = (FLAT_S, FLAT_S + RAMP_S, 2 * FLAT_S + RAMP_S, 2 * FLAT_S + 2 * RAMP_S)
    if second < ends[0]:
        return LOW
    if second < ends[1]:
        return LOW + (1 - LOW) * (second - ends[0]) / RAMP_S
    if second < ends[2]:
        return 1.0
    if second < ends[3]:
        return 1 - (1 - LOW) * (second - ends[2]) / RAMP_S
    return LOW if second < ends[3] + FLAT_S else None


def day(second: float) -> float | None:
    """Returns the share of the peak rate at a second of two days; None after their end."""
    if second >= 2 * DAY_S:
        return None
    return LOW + (1 - LOW) * (1 - math.cos(2 * math.pi * second / DAY_S)) / 2


LOADS: dict[str, Callable[[float], float | None]] = {"ramp": ramp, "day": day}


def requests(load: str, peak: float, lengths: Lengths, seed: int) -> Iterator[PlannedRequest]:
    """Yields the requests of a load: a Poisson process of the peak rate, thinned (Lewis and
    Shedler, 1979).
    """
    random, at = Random(seed), 0.0
    for prompt, answer in cycle(lengths):
        share = 0.0
        while random.random() >= share:
            at += random.expovariate(peak)
            found = LOADS[load](at)
            if found is None:
                return
            share = found
        # Prompts have no common prefix.
        ids = tuple(random.choices(range(32_000), k=prompt))
        yield PlannedRequest(at, None, ids, max(1, answer), random.getrandbits(31))


def profile(start_s: float) -> Profile:
    """Returns the profile of a published model on a published device."""
    found = find_model(MODEL)
    assert found is not None, "the table has it"
    model, efficiency = published(found, None), Efficiency()
    kv = KvSize(model.shape, "bf16", "native")
    costs = Roofline(model.memory, kv, find_device(DEVICE), efficiency, 1).linear(32, 1024, 512)
    return Profile(replace(costs, start_s=start_s), int(kv.bytes_per_token), 32_768, 32_000)


def policy_file(
    name: str, folder: Path, most: int, ttft_ms: float = TTFT_MS, itl_ms: float = ITL_MS
) -> Path:
    """Writes a shipped policy with the bounds and objectives of a comparison."""
    policy: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for pool in ("prefill", "decode"):
        policy[pool]["max_replicas"] = most
        for metric in policy[pool]["metrics"]:
            if metric["name"] in ("slo", "ttft_p95_ms", "itl_p95_ms"):
                limit = ttft_ms if pool == "prefill" else itl_ms
                key = {"prefill": "ttft_ms", "decode": "itl_ms"}[pool]
                metric[key if metric["name"] == "slo" else "target"] = limit
    if "profile" in policy:
        policy["profile"] = "profile.json"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(policy))
    return path


def run(name: str, load: str, worker: Profile, peak: float, lengths: Lengths, seed: int) -> Report:
    """Simulates one policy under one load."""
    config = ClusterConfig.model_validate(
        {"kv": {"memory": KV_MEMORY}, "router": {"max_queue": 100_000}, "slo": None}
    )
    with TemporaryDirectory() as folder:
        (Path(folder) / "profile.json").write_text(json.dumps(worker.to_json()))
        policy = load_policy(policy_file(name, Path(folder), MOST_WORKERS))
        scenario = Scenario(
            config=config, pools={"prefill": (worker,), "decode": (worker,)}, policy=policy
        )
        slos = (Slo("ttft", TTFT_MS), Slo("tpot", ITL_MS))
        return simulate(scenario, requests(load, peak, lengths, seed), {"policy": name}, slos)


def drawn(count: int, seed: int) -> Lengths:
    """Returns lengths as of chats: log-normal."""
    random = Random(seed)
    return [
        (
            int(min(8192, max(8, random.lognormvariate(6.5, 0.9)))),
            int(min(1024, max(4, random.lognormvariate(5.0, 0.7)))),
        )
        for _ in range(count)
    ]


def main(
    trace: Annotated[
        Path | None, typer.Option(help="Azure trace with the lengths. Default: drawn.")
    ] = None,
    peak: Annotated[float, typer.Option(help="Requests per second at the peak.")] = 20,
    start_s: Annotated[float, typer.Option(help="Seconds that a worker takes to start.")] = 45,
    policy: Annotated[list[str] | None, typer.Option(help="Policy; repeatable.")] = None,
    load: Annotated[list[str] | None, typer.Option(help="Load; repeatable.")] = None,
    seed: int = 0,
) -> None:
    """Compare the shipped policies."""
    lengths = drawn(4096, seed)
    if trace is not None:
        with trace.open(newline="") as file:
            lengths = [(one.input_tokens, one.output_tokens) for one in read_azure(trace, file)]
    worker = profile(start_s)
    table = Table("load", "policy", "within SLO", "TTFT p95", "worker-seconds", "most", "changes")
    cases = [(one, name) for one in load or LOADS for name in policy or POLICIES]
    for one, name in track(cases, console=Console(stderr=True)):
        report = run(name, one, worker, peak, lengths, seed)
        met = sum(all(slo.met(row) for slo in report.slos) for row in report.rows)
        ttft = sorted(row.ttft_s for row in report.rows if row.ttft_s is not None)
        assert report.timeline is not None, "there is one router"
        samples, changes = report.timeline.samples, report.timeline.decisions
        most = [
            max(sample.pools[pool].workers for sample in samples) for pool in ("prefill", "decode")
        ]
        table.add_row(
            one,
            name,
            f"{met / len(report.rows):.1%}",
            f"{percentile(ttft, 95):.2f} s",
            f"{report.options['worker_seconds']:,.0f}",
            f"{most[0]} + {most[1]}",
            str(len(changes)),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
