"""Compares the scaling policies over a ramp on a local cluster:
`python benchmarks/look_ahead_cluster.py` (as root, with cgroups of version 1).

So that more workers are more capacity on a machine with few cores, each worker that serves gets
--share of a core from the kernel's scheduler (a cgroup with a quota per 5 ms). A worker that starts
has no limit. The rate of a Poisson process rises linearly from a tenth of the peak to the peak,
stays there, and falls again. All policies get the same requests and bounds. A policy is better if
more requests meet the SLO for no more worker-seconds.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from look_ahead import policy_file
from rich.console import Console
from rich.table import Table

from kvrelay.bench.profiling.run import Options
from kvrelay.bench.profiling.run import run as fit_profile
from kvrelay.client.admin import AdminClient
from kvrelay.client.connection import Connection
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.lengths import parse_lengths
from kvrelay.loadtest.measure import Run, measure
from kvrelay.loadtest.rate import Stage
from kvrelay.loadtest.report.report_file import save
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.senders.target import open_target
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import Workload
from kvrelay.percentiles import percentile
from kvrelay.planning.profile import Profile

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 5000
TTFT_MS, ITL_MS = 1000.0, 100.0
MOST_WORKERS = 4
PROMPT, ANSWER = "400-800", "16-32"
LOW = 0.1
TIMEOUT_S = 600.0

log = Console(stderr=True, width=120)


@contextmanager
def limited(admin: str, share: float) -> Iterator[None]:
    """Limits each worker of the cluster to the share of a core, once it serves."""
    with ExitStack() as stack:
        groups: dict[int, Path] = {}

        def limit(pid: int) -> None:
            group = CGROUPS / f"kvrelay-worker-{pid}"
            group.mkdir()
            groups[pid] = group
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
            (group / "cgroup.procs").write_text(str(pid))

        def watch() -> None:
            with AdminClient(admin) as client:
                for status in client.watch(0.2):
                    if ended.is_set():
                        return
                    for worker in (one for pool in status.pools for one in pool.workers):
                        if worker.pid not in groups and worker.state == "ready":
                            # The worker may just have ended.
                            with suppress(ProcessLookupError):
                                limit(worker.pid)

        ended = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield
    for group in groups.values():
        for pid in (group / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


def slowed(profile: Profile, share: float) -> Profile:
    """Returns the profile of a worker that has this share of a core."""
    costs = profile.costs
    steps = {
        one.name: getattr(costs, one.name) / share
        for one in fields(costs)
        if one.name.startswith(("prefill_", "decode_", "handoff_")) and one.name.endswith("_s")
    }
    bends = tuple((batch, more_s / share) for batch, more_s in costs.decode_bends)
    return replace(profile, costs=replace(costs, **steps, decode_bends=bends))


async def run(policy: Path, share: float, load: Workload) -> Report:
    """Runs the load on a cluster with the policy."""
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo"},
            "kv": {"memory": "128MiB"},
            "decode": {"max_batch": 32},
            # Decode workers would help an overloaded prefill pool.
            "slo": None,
            "autoscaling": str(policy),
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
        }
    )
    async with LocalCluster(config, quiet=True) as cluster:
        connection = Connection(None, None, None, None)
        ends = cluster.endpoints
        async with open_target(ends.grpc, TIMEOUT_S, ends.admin, None, connection) as target:
            plan = list(load.plan(target.model.vocab_size))
            slos = (Slo("ttft", TTFT_MS), Slo("tpot", ITL_MS))
            options = {"target": "cluster", "policy": policy.stem, **load.options()}
            with limited(ends.admin, share):
                return await measure(
                    target, Run(plan, options, slos), lambda _: None, asyncio.Event()
                )


def row(name: str, report: Report) -> tuple[str, ...]:
    """Returns the row of the table for a policy."""
    met = sum(one.ok and all(slo.met(one) for slo in report.slos) for one in report.rows)
    ttft = sorted(one.ttft_s for one in report.rows if one.ttft_s is not None)
    assert report.timeline is not None, "the cluster has an admin port"
    samples = report.timeline.samples
    pools = [[sample.pools[pool].workers for sample in samples] for pool in ("prefill", "decode")]
    seconds = sum(map(sum, pools)) / len(samples) * report.duration_s
    return (
        name,
        f"{met / len(report.rows):.1%}",
        f"{percentile(ttft, 50):.2f} s",
        f"{percentile(ttft, 95):.2f} s",
        f"{seconds:,.0f}",
        " + ".join(str(max(pool)) for pool in pools),
    )


def main(
    policy: Annotated[list[str] | None, typer.Option(help="Policy; repeatable.")] = None,
    share: Annotated[float, typer.Option(help="Share of a core of each worker.")] = 0.2,
    peak_workers: Annotated[
        float, typer.Option(help="Prefill workers that the highest rate needs.")
    ] = 2.0,
    ramp_s: Annotated[float, typer.Option(help="Seconds in which the rate rises or falls.")] = 60,
    flat_s: Annotated[float, typer.Option(help="Seconds at the lowest and highest rate.")] = 45,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the demo model. Default: fit one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path(),
    seed: int = 0,
) -> None:
    """Compare the shipped policies."""
    if profile is None:
        log.print("fitting the profile")
        found = fit_profile(Options("demo"), lambda _text, _total: lambda: None)
    else:
        found = Profile.parse(profile.read_text())
    worker = slowed(found, share)
    prompt_s = worker.costs.prompt_s(round(parse_lengths(PROMPT, "prompt").mean), 512)
    # So many prefill workers are four fifths busy at the peak.
    peak = 0.8 * peak_workers / prompt_s
    load = Workload(
        rate=(
            Stage(LOW * peak, LOW * peak, flat_s),
            Stage(LOW * peak, peak, ramp_s),
            Stage(peak, peak, flat_s),
            Stage(peak, LOW * peak, ramp_s),
            Stage(LOW * peak, LOW * peak, flat_s),
        ),
        burstiness=1.0,
        num_requests=None,
        duration=None,
        prompt_tokens=parse_lengths(PROMPT, "prompt_tokens"),
        output_tokens=parse_lengths(ANSWER, "output_tokens"),
        text=False,
        seed=seed,
    )
    log.print(f"peak {peak:.1f} requests/s")
    table = Table("policy", "within SLO", "TTFT p50", "TTFT p95", "worker-seconds", "most")
    with TemporaryDirectory() as folder:
        (Path(folder) / "profile.json").write_text(json.dumps(worker.to_json()))
        for name in policy or ("queue-depth", "look-ahead"):
            log.print(name)
            report = asyncio.run(
                run(policy_file(name, Path(folder), MOST_WORKERS, TTFT_MS, ITL_MS), share, load)
            )
            save(report, out / f"ramp-{name}.json")
            table.add_row(*row(name, report))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
