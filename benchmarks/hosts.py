"""Loses hosts under load and checks all answers: `python benchmarks/hosts.py --requests 300`.

There are three hosts, each in its own network, process and mount namespaces, with a Ray cluster
over them. `kvrelay serve --ray-address auto` runs 2 prefill and 2 decode workers with TLS. Under
load, a host that decodes is cut off and all its processes are killed. Then a third decode worker is
requested, which waits until a new host joins. Each answer is compared, token by token, with the
answer of the same model in one process. The exit code is 1 if an answer differs or a request fails.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

# Makes the test packages importable.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import typer
from faults.checkers import Violation, check_one_end, check_same, check_tokens
from faults.client import Asking
from faults.history import WHOLE, Case, RequestHistory
from faults.prompts import tokens
from rich.console import Console
from support import host_namespaces
from support.host_cluster import HostCluster, Serving, hosts_of

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models import resolve_model
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import POOLS
from kvrelay.wire import inference as wire
from kvrelay.wire.cluster import ClusterStatus

# Number of different requests, alternately greedy and seeded.
KINDS = 8
AT_ONCE = 4
TIMEOUT_S = 300.0

log = Console(stderr=True, log_path=False, width=200)


@dataclass
class Report:
    """Results of the benchmark."""

    transport: str
    # By pool: addresses of the hosts of its workers.
    spread: dict[str, list[str]] = field(default_factory=dict)
    # Hand-offs between hosts, by transport.
    handoffs: dict[str, int] = field(default_factory=dict)
    # Addresses of the lost hosts.
    lost: list[str] = field(default_factory=list)
    # `spread` on the remaining hosts, after each loss.
    spread_after: list[dict[str, list[str]]] = field(default_factory=list)
    # Time until both pools were complete again, after each loss.
    seconds_until_whole: list[float] = field(default_factory=list)
    # Why workers were pending, as in `kvrelay status`.
    waited: list[str] = field(default_factory=list)
    # Addresses of the new hosts on which the pending workers started.
    joined: list[str] = field(default_factory=list)
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    # Requests that continued on another worker.
    moved: int = 0
    # The first wrong answer; empty if all are right.
    wrong: str = ""
    # Between two tokens of a stream.
    longest_gap_s: float = 0.0


@dataclass
class Load:
    """Repeats the same requests, AT_ONCE at a time, until `over` is set."""

    serving: Serving
    # Tokens of an answer.
    length: int
    expected: dict[int, tuple[int, ...]]
    asked: list[RequestHistory] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Sends requests until `over` is set."""
        draw = random.Random(0)

        async def work() -> None:
            while not self.over.is_set():
                kind = draw.randrange(KINDS)
                history = RequestHistory(f"{len(self.asked)}-{kind}", self.expected[kind])
                self.asked.append(history)
                request = request_of(kind, self.length, history.request_id)
                await Asking(history, request, self.serving.channel, timeout=TIMEOUT_S).task
                self._ended += 1
                self._news.set()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def reached(self, count: int) -> None:
        """Waits until `count` requests have ended."""
        while self._ended < count:
            self._news.clear()
            await self._news.wait()


def prompt_of(kind: int) -> tuple[int, ...]:
    """Returns the prompt of a kind of request."""
    return tokens(100 + 50 * kind, kind)


def sampling_of(kind: int, length: int) -> wire.SamplingOptions:
    """Returns the sampling options of a kind of request."""
    return wire.SamplingOptions(
        max_tokens=length,
        ignore_eos=True,
        seed=kind,
        temperature=1.1 if kind % 2 else 0.0,
        presence_penalty=0.4 if kind % 2 else 0.0,
    )


def request_of(kind: int, length: int, name: str) -> wire.GenerateRequest:
    """Returns a request of this kind."""
    return wire.GenerateRequest(
        request_id=name, token_ids=prompt_of(kind), sampling=sampling_of(kind, length)
    )


def in_one_process(length: int) -> dict[int, tuple[int, ...]]:
    """Computes the expected answers with one engine in this process."""
    runner = ModelRunner.load(resolve_model("demo"), dtype="float32", kv_bytes=64 * 2**20)
    answers = {}
    for kind in range(KINDS):
        options = sampling_of(kind, length)
        params = SamplingParams(
            temperature=options.temperature or 0.0,
            seed=kind,
            presence_penalty=options.presence_penalty or 0.0,
        )
        ids, computed = list(prompt_of(kind)), 0
        for _ in range(length):
            request = SampleRequest(params, ids, len(prompt_of(kind)))
            ((sampled,),) = runner.run(
                [Segment(ids[computed:], computed, range(runner.num_blocks), request)]
            )
            computed = len(ids)
            ids.append(sampled.token_id)
        answers[kind] = tuple(ids[len(prompt_of(kind)) :])
    runner.close()
    return answers


async def handed_over(serving: Serving, length: int, report: Report) -> None:
    """Sends each request once and counts the hand-offs between hosts."""
    addresses = {
        worker.worker_id: worker.host
        for pool in (await serving.status()).pools
        for worker in pool.workers
    }
    stub = wire.InferenceServiceStub(serving.channel)
    for kind in range(KINDS):
        request = wire.request_to_proto(request_of(kind, length, f"first-{kind}"))
        async for message in stub.Generate(request, timeout=TIMEOUT_S):
            ledger = wire.response_from_proto(message).ledger
        if ledger is not None and ledger.handoff is not None:
            last = ledger.attempts[-1]
            if addresses[last.prefill_worker] != addresses[last.decode_worker]:
                report.handoffs[ledger.handoff.transport] = (
                    report.handoffs.get(ledger.handoff.transport, 0) + 1
                )


def spread(status: ClusterStatus) -> dict[str, list[str]]:
    """Returns the sorted host addresses of the workers, by pool."""
    return {pool: sorted(hosts_of(status, pool)) for pool in POOLS}


async def lose_a_host(cluster: HostCluster, serving: Serving, raylet: bool, report: Report) -> None:
    """Loses a decoding host other than the head. Waits until both pools are complete on the
    remaining hosts, and until a third decode worker runs on a new host.
    """

    def decoding(status: ClusterStatus) -> list[str]:
        busy = [
            one
            for pool in status.pools
            if pool.name == "decode"
            for one in pool.workers
            if one.load.running
        ]
        return [one.host for one in busy if one.host != cluster.head.address]

    status = await serving.until(
        lambda status: bool(decoding(status)), "a host other than the head decodes"
    )
    lost = cluster.hosts[decoding(status)[0]]
    log.log(f"losing host {lost.address}; {spread(status)}")
    if raylet:
        cluster.lose_raylet(lost)
    else:
        await cluster.lose(lost)
    report.lost.append(lost.address)
    began = time.monotonic()
    # One worker more than the remaining hosts have room for.
    await serving.scale(decode=3)

    def gone_and_pending(status: ClusterStatus) -> bool:
        hosts = {one.host for pool in status.pools for one in pool.workers}
        return lost.address not in hosts and bool(status.pending)

    status = await serving.until(gone_and_pending, "a worker is pending")
    report.waited += [f"{one.worker_id}: {one.reason}" for one in status.pending]
    log.log(f"{report.waited[-1]}")

    def whole(status: ClusterStatus) -> bool:
        left = set(cluster.hosts)
        return all(sum(host in left for host in hosts_of(status, pool)) >= 2 for pool in POOLS)

    status = await serving.until(whole, "both pools are complete on the remaining hosts")
    report.seconds_until_whole.append(time.monotonic() - began)
    report.spread_after.append(spread(status))
    log.log(f"complete after {report.seconds_until_whole[-1]:.0f} s: {spread(status)}")
    host = await cluster.boot()
    await cluster.join(host)
    await serving.until(
        lambda status: host.address in hosts_of(status, "decode"),
        "the pending worker started on the new host",
    )
    status = await serving.until(lambda status: not status.pending, "no worker is pending")
    report.joined.append(host.address)
    log.log(f"host {host.address} joined: {spread(status)}")
    await serving.scale(decode=2)


async def measure(
    folder: Path, transport: str, requests: int, losses: int, length: int, raylet: bool
) -> Report:
    """Runs the cluster, loses `losses` hosts under load and returns the report."""
    report = Report(transport)
    await host_namespaces.make_network()
    async with HostCluster(folder, transport) as cluster:
        hosts = [await cluster.boot() for _ in range(3)]
        expecting = asyncio.create_task(asyncio.to_thread(in_one_process, length))
        url = await cluster.start_redis()
        await cluster.join(hosts[0])
        await asyncio.gather(*(cluster.join(host) for host in hosts[1:]))
        log.log("Ray runs on three hosts")
        async with cluster.serving(url) as serving:
            report.spread = spread(await serving.status())
            log.log(f"kvrelay serves: {report.spread}")
            await handed_over(serving, length, report)
            load = Load(serving, length, await expecting)
            running = asyncio.create_task(load.run())
            try:
                for number in range(losses):
                    await load.reached(requests * number // losses)
                    await lose_a_host(cluster, serving, raylet, report)
                await load.reached(requests)
            finally:
                load.over.set()
                await running
    judge(load, report)
    return report


def judge(load: Load, report: Report) -> None:
    """Checks all answers and fills in the report."""
    report.requests = len(load.asked)
    report.failed = [
        f"{one.end.status}: {one.end.message}" for one in load.asked if one.end.status not in WHOLE
    ]
    report.moved = sum(len(one.attempts) > 1 for one in load.asked)
    report.longest_gap_s = max(one.longest_gap_s for one in load.asked)
    case = Case(0.0, requests=load.asked)
    try:
        for check in (check_one_end, check_tokens, check_same):
            check(case)
    except Violation as error:
        report.wrong = str(error)


def main(
    requests: Annotated[
        int, typer.Option(min=1, help="Least number of requests under load.")
    ] = 200,
    losses: Annotated[
        int, typer.Option(min=0, help="Number of hosts to lose, one after the other.")
    ] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 200,
    raylet: Annotated[
        bool, typer.Option("--raylet", help="Kill only the raylet of the host.")
    ] = False,
    transport: Annotated[
        str, typer.Option(help="Transport of hand-offs: grpc, gloo, auto.")
    ] = "grpc",
    output: Annotated[Path | None, typer.Option("--json", help="File for the results.")] = None,
) -> None:
    """Lose hosts under load and compare all answers."""
    if not host_namespaces.in_world():
        if why := host_namespaces.missing():
            raise typer.BadParameter(why)
        arguments = host_namespaces.world_command(Path(__file__), *sys.argv[1:])
        raise typer.Exit(asyncio.run(host_namespaces.wait_for(arguments)))
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-hosts-"))
    try:
        report = asyncio.run(measure(folder, transport, requests, losses, length, raylet))
    except BaseException:
        log.log(f"the logs of the hosts are in {folder}")
        raise
    shutil.rmtree(folder)
    text = json.dumps(asdict(report), indent=1)
    print(text)
    if output is not None:
        output.write_text(text)
    raise typer.Exit(1 if report.failed or report.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
