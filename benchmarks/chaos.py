"""Injects faults under load and counts their effects: `python benchmarks/chaos.py kill --minutes
10`. Further commands are restart, cancel and scale.

Each answer is compared, token by token, with the answer of the same request in a run without
faults. The exit code is 1 if an answer differs or a request fails. The recorder and the checkers
are those of the fault matrix in tests/faults.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

# Makes the test packages importable.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import grpc
import typer
from faults.cancels import STATES, held_in, prepared
from faults.checkers import Violation, check_one_end, check_tokens, differing
from faults.client import Asking
from faults.fleet import Fleet, running_fleet
from faults.history import WHOLE, Case, RequestHistory
from faults.prompts import tokens
from rich.console import Console
from support.running_cluster import ANY_PORT, RunningCluster, running_on

from kvrelay.config.schema import ClusterConfig
from kvrelay.wire import inference as wire
from kvrelay.wire.cluster import ClusterStatus, WorkerStatus, pb

# Number of different requests.
KINDS = 24
AT_ONCE = 4
# Tokens of an answer.
LENGTH = 200
TIMEOUT_S = 300.0
LEASE_S = 10.0
# Tokens that a dead worker had sent arrive for this long after its death.
IN_FLIGHT_S = 0.05
# Limit for the time from a cancel until the blocks are free.
BLOCKS_FREE_MS = 250.0

app = typer.Typer(add_completion=False)
log = Console(stderr=True)


@dataclass
class Load:
    """Repeats the same requests, AT_ONCE at a time, until `over` is set."""

    channel: grpc.aio.Channel
    seed: int
    kinds: int = KINDS
    length: int = LENGTH
    asked: list[RequestHistory] = field(default_factory=list)
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def learn(self) -> None:
        """Sends each request once, without faults, and stores the answers."""
        for kind in range(self.kinds):
            history = await self.one(kind)
            assert history.end.status in WHOLE, history.end
            self.expected[kind] = history.token_ids
        self.asked.clear()

    async def run(self) -> None:
        """Sends requests until `over` is set."""
        draw = random.Random(self.seed)

        async def work() -> None:
            while not self.over.is_set():
                await self.one(draw.randrange(self.kinds))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def one(self, kind: int) -> RequestHistory:
        """Sends one request. The kinds alternate between greedy sampling and seeded sampling with a
        penalty. Some prompts are long enough for a hand-off.
        """
        sampling = wire.SamplingOptions(
            max_tokens=self.length,
            ignore_eos=True,
            seed=kind,
            temperature=1.1 if kind % 2 else 0.0,
            presence_penalty=0.4 if kind % 2 else 0.0,
        )
        name = f"{len(self.asked)}-{kind}"
        history = RequestHistory(name, self.expected.get(kind))
        self.asked.append(history)
        request = wire.GenerateRequest(
            request_id=name,
            token_ids=tokens(40 + 20 * kind, self.seed * KINDS + kind),
            sampling=sampling,
        )
        await Asking(history, request, self.channel, timeout=TIMEOUT_S).task
        return history

    def report(self) -> bool:
        """Prints the counts. Returns whether no request failed and no answer differs."""
        failed = [one for one in self.asked if one.ends[-1].status not in WHOLE]
        wrong = differing(one for one in self.asked if one not in failed)
        moved = sum(len(one.attempts) > 1 for one in self.asked if one not in failed)
        try:
            case = Case(LEASE_S, requests=self.asked)
            check_one_end(case)
            check_tokens(case)
        except Violation as error:
            print(error)
            wrong += 1
        print(
            f"requests: {len(self.asked)}, failed: {len(failed)}, differing tokens: {wrong}, "
            f"moved to another worker: {moved}"
        )
        for status, count in Counter(
            f"{one.end.status}: {one.end.message}" for one in failed
        ).items():
            print(f"  {count} {status}")
        gaps = sorted(one.longest_gap_s for one in self.asked)
        print(f"longest gap between two tokens of a stream, in s: {distribution(gaps)}")
        return not failed and not wrong and bool(self.asked)


def pauses(asked: Iterable[RequestHistory], killed_at: float) -> list[float]:
    """Returns, for each stream that was open at the kill, the gap in seconds between the last token
    before the kill and the next token. Tokens in flight at the kill count as before it.
    """
    found = []
    for one in asked:
        times = [token.at for token in one.received]
        spans = [
            after - before
            for before, after in pairwise(times)
            if before <= killed_at + IN_FLIGHT_S < after
        ]
        found += spans
    return found


def distribution(values: list[float], digits: int = 2) -> str:
    """Formats percentiles, maximum and mean."""
    ordered = sorted(values)
    cuts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    shown = [
        f"{name} {ordered[min(len(ordered) - 1, int(cut * len(ordered)))]:.{digits}f}"
        for name, cut in cuts.items()
    ]
    return (
        f"{', '.join(shown)}, max {ordered[-1]:.{digits}f}, mean "
        f"{statistics.fmean(ordered):.{digits}f}"
    )


@asynccontextmanager
async def loaded_cluster(
    seed: int, policy: Path | None, each: int = 2
) -> AsyncIterator[tuple[RunningCluster, Load]]:
    """Yields a cluster with `each` prefill and `each` decode workers, started as by `kvrelay
    serve`, and a load that knows its answers without faults.
    """
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            # The load repeats its prompts.
            "kv": {"memory": "64MiB", "prefix_cache": False},
            "prefill": {"replicas": each, "chunk_tokens": 128},
            "decode": {"replicas": each},
            "listen": ANY_PORT,
            "autoscaling": None if policy is None else str(policy),
        }
    )
    async with (
        running_on(config) as cluster,
        grpc.aio.insecure_channel(cluster.local.endpoints.grpc) as channel,
    ):
        load = Load(channel, seed)
        await load.learn()
        yield cluster, load


Harm = Callable[[RunningCluster], Awaitable[str]]
# Kind of worker -> times of its kills, on the clock of the load.
Kills = dict[str, list[float]]


async def under_load(
    seed: int, harm: Harm, policy: Path | None = None, each: int = 2, kills: Kills | None = None
) -> bool:
    """Injects `harm` under load. Prints the findings; returns whether all checks passed."""
    async with loaded_cluster(seed, policy, each) as (cluster, load):
        well = await judged(cluster, load, harm, each)
        for victims, times in (kills or {}).items():
            if found := [pause for at in times for pause in pauses(load.asked, at)]:
                print(
                    f"pause of a stream after the kill of a {victims}, in s: {distribution(found)} "
                    f"({len(found)})"
                )
        return well


async def judged(cluster: RunningCluster, load: Load, harm: Harm, each: int = 2) -> bool:
    """Returns whether all requests were answered with the same tokens as without faults, and
    whether all blocks were freed.
    """
    running = asyncio.create_task(load.run())
    try:
        done = await harm(cluster)
    finally:
        load.over.set()
        await running
    print(done)
    well = load.report()
    status = await cluster.settled(each, each, seconds=300)
    intact = all(worker.load.integrity_ok for pool in status.pools for worker in pool.workers)
    print(f"blocks freed on all workers: {'yes' if intact else 'no, a check failed'}")
    return well and intact


def alive(workers: list[WorkerStatus], gone: set[int]) -> list[WorkerStatus]:
    """Returns the workers whose process ids are not in `gone`."""
    return [one for one in workers if one.pid not in gone]


@app.command()
def kill(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Duration of the load in minutes.")
    ] = 10.0,
    every: Annotated[float, typer.Option(help="Seconds between two kills.")] = 10.0,
    each: Annotated[int, typer.Option(min=1, help="Workers in each pool.")] = 2,
    standby: Annotated[int, typer.Option(min=0, help="Standby workers.")] = 0,
    pool: Annotated[
        str, typer.Option(help="Pool of the killed workers: prefill, decode, or any.")
    ] = "any",
    seed: int = 0,
) -> None:
    """Send SIGKILL to a random worker at regular intervals."""

    killed: Kills = {}
    spare: list[bool] = []

    async def harm(cluster: RunningCluster) -> str:
        draw = random.Random(seed)
        kills: Counter[str] = Counter()
        gone: set[int] = set()
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            await asyncio.sleep(every)
            status = await cluster.status()
            workers = [
                one
                for members in status.pools
                if pool in ("any", members.name)
                for one in members.workers
            ]
            victims = alive(workers, gone)
            if not victims:
                kills["no worker was alive"] += 1
                continue
            victim = draw.choice(victims)
            os.kill(victim.pid, signal.SIGKILL)
            ready = any(one.state == "ready" for one in status.standby)
            killed.setdefault(
                f"{victim.pool} worker, standby {'ready' if ready else 'not ready'}", []
            ).append(time.monotonic())
            gone.add(victim.pid)
            kills[victim.pool] += 1
            spare.append(ready)
            log.print(
                f"killed {victim.worker_id} ({victim.load.running} running), "
                f"{len(victims) - 1} workers left"
            )
        kept = f", {sum(spare)} of them while a standby worker was ready" if standby else ""
        return f"kills: {dict(kills)} in {minutes:g} minutes{kept}"

    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text(f"standby: {standby}\n")
        well = asyncio.run(under_load(seed, harm, policy, each, killed))
    raise typer.Exit(0 if well else 1)


@app.command()
def restart(seed: int = 0) -> None:
    """Drain and replace every worker, one after the other."""

    async def harm(cluster: RunningCluster) -> str:
        before = {one.worker_id for pool in (await cluster.status()).pools for one in pool.workers}
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "kvrelay.cli.main",
            "restart",
            "--admin",
            cluster.local.endpoints.admin,
        ]
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0, "kvrelay restart failed"
        left = before & {
            one.worker_id for pool in (await cluster.status()).pools for one in pool.workers
        }
        assert not left, f"not restarted: {left}"
        return f"{len(before)} workers restarted in {time.monotonic() - began:.0f} s"

    raise typer.Exit(0 if asyncio.run(under_load(seed, harm)) else 1)


@app.command()
def scale(
    events: Annotated[int, typer.Option(min=1)] = 50,
    every: Annotated[
        float, typer.Option(min=0.1, help="Longest pause between two events, in seconds.")
    ] = 10.0,
    rebalance: Annotated[bool, typer.Option(help="Workers may change their pool.")] = False,
    seed: int = 0,
) -> None:
    """Set both pools to random sizes, with and without waiting for the previous sizes."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text(f"rebalance: {str(rebalance).lower()}\n")
        well = asyncio.run(under_load(seed, rescaled(events, every, seed), policy))
    raise typer.Exit(0 if well else 1)


def rescaled(events: int, every: float, seed: int) -> Harm:
    """Returns a fault that sets random pool sizes `events` times."""

    async def harm(cluster: RunningCluster) -> str:
        draw = random.Random(seed)
        began, before = time.monotonic(), dict[str, str]()
        seen: Counter[str] = Counter()
        for _ in range(events):
            sizes = {"prefill": draw.randint(0, 3), "decode": draw.randint(1, 3)}
            await cluster.admin.SetPoolSize(pb.SetPoolSizeRequest(**sizes))
            if draw.random() < 0.5:
                seen["sizes reached"] += await _reached(cluster, sizes)
            else:
                await asyncio.sleep(draw.uniform(0.1, every))
            workers = [one for pool in (await cluster.status()).pools for one in pool.workers]
            log.print(
                f"desired {sizes}, actual "
                f"{dict(Counter(f'{one.pool} {one.state}' for one in workers))}"
            )
            seen["workers started"] += sum(one.worker_id not in before for one in workers)
            seen["workers changed pool"] += sum(
                before.get(one.worker_id, one.pool) != one.pool for one in workers
            )
            before |= {one.worker_id: one.pool for one in workers}
        await cluster.admin.SetPoolSize(pb.SetPoolSizeRequest(prefill=2, decode=2))
        return f"{events} scale events in {time.monotonic() - began:.0f} s; {dict(seen)}"

    return harm


async def _reached(cluster: RunningCluster, sizes: dict[str, int]) -> bool:
    """Waits until the pools have these sizes. Returns False if that takes longer than a start."""

    def so(status: ClusterStatus) -> bool:
        return {
            pool.name: sum(one.state == "ready" for one in pool.workers) for pool in status.pools
        } == sizes

    try:
        await cluster.until(so, f"{sizes}", seconds=60)
    except AssertionError:
        return False
    return True


@app.command()
def cancel(
    times: Annotated[int, typer.Option(min=7, help="Number of cancels in total.")] = 1000,
) -> None:
    """Cancel requests in each of the seven states and time how long their blocks stay held."""
    if not asyncio.run(cancel_in_all(times)):
        raise typer.Exit(1)


async def cancel_in_all(times: int) -> bool:
    """Cancels requests in every state. Returns whether all blocks were free in time."""
    each = -(-times // len(STATES))
    everything: list[float] = []
    async with running_fleet() as fleet:
        for state in STATES:
            case = Case(fleet.config.transfer.lease_s)
            async with prepared(fleet, case, state):
                before = await held(fleet)
                seconds = []
                for _ in range(each):
                    asked = await held_in(fleet, case, state)
                    began = asked.cancel()
                    while await held(fleet) > before:
                        assert time.monotonic() < began + LEASE_S, (
                            f"blocks are still held after a cancel in state {state}"
                        )
                    seconds.append(1000 * (time.monotonic() - began))
                    assert (await asked.ended()).end.status == "CANCELLED"
            print(f"{state}: {each} cancels, ms until blocks were free: {distribution(seconds, 1)}")
            everything += seconds
    late = sum(one > BLOCKS_FREE_MS for one in everything)
    print(
        f"all: {len(everything)} cancels, ms: {distribution(everything, 1)}; {late} over "
        f"{BLOCKS_FREE_MS:g} ms"
    )
    return not late


async def held(fleet: Fleet) -> int:
    """Returns the number of blocks held on all workers, read from the workers."""
    return sum(
        one.blocks_held
        for one in await asyncio.gather(*(worker.sample() for worker in fleet.alive))
    )


if __name__ == "__main__":
    app()
