"""Applies a load that steps 1× → 12× → 1×, once with long prompts and once with long answers:
`python benchmarks/elastic.py`.

The cluster runs as under `kvrelay serve`, and the requests are those of `kvrelay loadtest run
--rate R:S,12R:S,R:S --admin …`. 1× is a share of the capacity of one worker, measured just before,
so the same steps fit any machine. The exit code is 1 if a check fails. FOLDER/prefill.html and
FOLDER/decode.html show queues, pool sizes, reasons and latencies on one timeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from step_verdict import Finding, verdict

from kvrelay.client import AsyncClient, Completion
from kvrelay.client.admin import AdminClient
from kvrelay.client.connection import Connection
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.html_report import page
from kvrelay.loadtest.lengths import parse_lengths
from kvrelay.loadtest.measure import Run, measure
from kvrelay.loadtest.rate import Stage
from kvrelay.loadtest.report.report_file import save, write
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import INTERVAL_S
from kvrelay.loadtest.senders.target import open_target
from kvrelay.loadtest.workload import Workload
from kvrelay.types.workers import PoolName
from kvrelay.wire.cluster import ClusterStatus

ROOT = Path(__file__).parents[1]
# decode.max_batch.
SLOTS = 8
# The load at 1×, as a share of the capacity of one worker. The scaling policy shrinks a pool to one
# worker below a load of 0.38, also if the machine is half as fast as during the measurement.
SHARE = 0.15
STEP = 12
TRIES = 4
TIMEOUT_S = 600.0
# The gaps vary half as much as in a Poisson process, so the pools follow the step and not random
# bursts.
BURSTINESS = 4.0


@dataclass(frozen=True, slots=True)
class Case:
    """One load, and the pool that should follow it."""

    pool: PoolName
    prompt_tokens: int
    output_tokens: int


# Prompts of 32 tokens take the local path, so the prefill pool has no share in the second load.
CASES = (Case("prefill", 1200, 4), Case("decode", 32, 200))


@dataclass(frozen=True, slots=True)
class Steps:
    """1× for `calm_s`, 12× for `high_s`, then 1× until the pools have their initial sizes, for at
    most `tail_s`.
    """

    calm_s: float
    high_s: float
    tail_s: float

    def rate(self, base: float) -> tuple[Stage, ...]:
        """Returns the stages. base: requests per second at 1×."""
        return (
            Stage(base, base, self.calm_s),
            Stage(STEP * base, STEP * base, self.high_s),
            Stage(base, base, self.tail_s),
        )


def config(policy: Path) -> ClusterConfig:
    """Returns the configuration of the cluster."""
    return ClusterConfig.model_validate(
        {
            "model": {"path": "demo"},
            "kv": {"memory": "128MiB"},
            "prefill": {"chunk_tokens": 256},
            "decode": {"max_batch": SLOTS},
            # Decode workers would help an overloaded prefill pool, and grow for it.
            "slo": None,
            "autoscaling": str(policy.resolve()),
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
        }
    )


async def capacity(client: AsyncClient, case: Case) -> float:
    """Returns the requests per second that one worker of the case's pool can serve. The best of
    several tries counts: a try that other load slows down would make the step from 1× to 12× too
    small.
    """

    async def ask(number: int) -> Completion:
        prompt = [(number * 31 + place * 7) % 251 + 10 for place in range(case.prompt_tokens)]
        return await client.generate(
            token_ids=prompt, max_tokens=case.output_tokens, ignore_eos=True
        ).result()

    await ask(0)
    seconds = []
    for _ in range(TRIES):
        began = time.monotonic()
        await asyncio.gather(*(ask(1 + SLOTS * len(seconds) + number) for number in range(SLOTS)))
        seconds.append(time.monotonic() - began)
    return SLOTS / min(seconds)


async def run_case(cluster: LocalCluster, case: Case, steps: Steps, seed: int) -> Report:
    """Measures the capacity, then applies the load of one case."""
    async with open_target(
        cluster.endpoints.grpc,
        TIMEOUT_S,
        cluster.endpoints.admin,
        None,
        Connection(None, None, None, None),
    ) as target:
        assert target.admin is not None
        calm = _sizes(await asyncio.to_thread(target.admin.status))
        async with AsyncClient(cluster.endpoints.grpc) as client:
            base = SHARE * await capacity(client, case)
        # The pools may have followed the load of the capacity measurement.
        await asyncio.to_thread(_wait_for, calm, target.admin)
        load = Workload(
            rate=steps.rate(base),
            burstiness=BURSTINESS,
            num_requests=None,
            duration=None,
            prompt_tokens=parse_lengths(str(case.prompt_tokens), "prompt_tokens"),
            output_tokens=parse_lengths(str(case.output_tokens), "output_tokens"),
            text=False,
            seed=seed,
        )
        plan = list(load.plan(target.model.vocab_size))
        options = {"target": "a local cluster", "model": target.model.id, **load.options()}
        back = asyncio.Event()
        watching = asyncio.create_task(
            _set_when_back(back, calm, target.admin, steps.calm_s + steps.high_s)
        )
        try:
            wanted = takewhile(lambda _: not back.is_set(), plan)
            return await measure(target, Run(wanted, options, ()), lambda _: None, asyncio.Event())
        finally:
            watching.cancel()


# For each pool: desired and actual number of workers.
Sizes = list[tuple[int, int]]


async def _set_when_back(
    back: asyncio.Event, calm: Sizes, admin: AdminClient, after_s: float
) -> None:
    """Waits `after_s`, then until the pools have their initial sizes, then for some samples. Sets
    `back`.
    """
    await asyncio.sleep(after_s)
    await asyncio.to_thread(_wait_for, calm, admin)
    await asyncio.sleep(4 * INTERVAL_S)
    back.set()


def _wait_for(sizes: Sizes, admin: AdminClient) -> None:
    next(one for one in admin.watch(INTERVAL_S) if _sizes(one) == sizes)


def _sizes(status: ClusterStatus) -> Sizes:
    return [(pool.desired, len(pool.workers)) for pool in status.pools]


@asynccontextmanager
async def running(policy: Path) -> AsyncIterator[LocalCluster]:
    """Runs a local cluster with the policy."""
    async with LocalCluster(config(policy), quiet=True) as cluster:
        yield cluster


def tail_s(policy: AutoscalingPolicy, high_s: float) -> float:
    """Returns an upper bound for the time to serve the queue of the 12× stage and to shrink a pool
    step by step.
    """
    shrinks = [
        rules.downscale_delay_s * (rules.max_replicas - 1)
        for rules in (policy.prefill, policy.decode)
        if rules
    ]
    return 2 * high_s + 1.5 * max(shrinks) + 60


def show(case: Case, findings: Iterable[Finding]) -> Table:
    """Returns a table of the findings."""
    title = (
        f"{case.prompt_tokens} prompt tokens, {case.output_tokens} output tokens: the {case.pool} "
        f"pool should follow the load"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "check", "found"):
        table.add_column(name)
    for one in findings:
        table.add_row("✓" if one.holds else "✗", one.what, one.found)
    return table


async def run(policy: Path, seconds: float, folder: Path, seed: int, console: Console) -> bool:
    """Runs both cases, writes the reports and prints the findings. Returns whether all hold."""
    rules = load_policy(policy)
    well = True
    for case in CASES:
        steps = Steps(seconds, seconds, tail_s(rules, seconds))
        async with running(policy) as cluster:
            report = await run_case(cluster, case, steps, seed)
        save(report, folder / f"{case.pool}.json")
        write(folder / f"{case.pool}.html", page(report))
        findings = verdict(report, rules, case.pool, steps.calm_s, steps.calm_s + steps.high_s)
        console.print(show(case, findings))
        console.print(
            f"rate {report.options['rate']}, {len(report.rows)} requests in "
            f"{report.duration_s:.0f} s"
        )
        for one in report.timeline.decisions if report.timeline else ():
            console.print(
                f"  {one.at_s:6.1f} s  {one.pool} {one.before} → {one.after}: {one.reason}"
            )
        well = well and all(one.holds for one in findings)
    return well


def main(
    policy: Annotated[Path, typer.Option(help="Autoscaling policy of both pools.")] = ROOT
    / "configs"
    / "autoscaling"
    / "queue-depth.yaml",
    seconds: Annotated[
        float, typer.Option(min=5, help="Duration of the first step and of the high step.")
    ] = 60,
    folder: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path(),
    seed: int = 0,
) -> None:
    """Run both loads and print the findings."""
    console = Console(width=160)
    raise typer.Exit(0 if asyncio.run(run(policy, seconds, folder, seed, console)) else 1)


if __name__ == "__main__":
    typer.run(main)
