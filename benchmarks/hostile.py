"""Measures how far a hostile tenant can slow down the requests of another tenant at a router. Runs
each attack of a catalogue while a second tenant, the victim, sends a constant load.

    python benchmarks/hostile.py --seconds 20

The router has a core of its own. The attacker is a process on the other cores. It runs at idle
priority and is limited to 50 MB/s and 1,000 connections. The victim requests short answers,
alternating between HTTP and gRPC, and measures the time to first token. The workers are mocks
without an engine, so every delay comes from the router. At the end, during an attack, the benchmark
measures how long a revoked token is still accepted, and how long the router takes to exit after
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hostile_attacks
import httpx
from hostile_attacks import CATALOGUE, Target
from prometheus_client.parser import text_string_to_metric_families

import kvrelay
from kvrelay.bench.router.mock_cluster import MockPools, mock_cluster
from kvrelay.bench.router.router_process import RouterProcess
from kvrelay.config.tokens_file import digest_of, new_token
from kvrelay.percentiles import percentile
from kvrelay.process.child import bound_to_parent, send_signal
from kvrelay.process.machine import processor_name

POOLS = MockPools(prefill=0, decode=2, slots=64, step_s=0.01, token=20)
# Requests per second of the victim.
RATE = 10.0
# gRPC connections of the victim.
CONNECTIONS = 32
PROMPT = list(range(10, 90))
TOKENS = 4
# Time from the start or the end of an attack to the first measured request.
SETTLE_S = 2.0
STOP_S = 60.0
STALL = "kvrelay_event_loop_stall_seconds"


class Tokens:
    """The tokens file of the cluster, and its tokens by tenant."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.yaml"
        self.secret = {name: new_token() for name in ("victim", "hostile", "monitor")}
        self.write(self.secret)

    def write(self, names: Any) -> None:
        """Writes the tokens of these tenants to the file."""
        tenants = [
            {
                "name": name,
                "tokens_sha256": [digest_of(self.secret[name])],
                "roles": ["monitor" if name == "monitor" else "client"],
            }
            for name in names
        ]
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"tenants": tenants}))
        beside.replace(self.path)


@dataclass(slots=True)
class Cluster:
    """The router, and measurements of its process."""

    router: RouterProcess
    tokens: Tokens
    peak_bytes: int = 0
    # Counts by histogram bucket at the last call of worst_stall_s.
    stalls: dict[float, float] = field(default_factory=dict)

    async def watch(self) -> None:
        """Records the peak resident size, until cancelled."""
        while True:
            self.peak_bytes = max(self.peak_bytes, self.router.resident_bytes())
            await asyncio.sleep(0.05)

    async def worst_stall_s(self) -> float | None:
        """Returns the upper bound of the longest stall of the router's event loop since the last
        call, in seconds. Returns 0 if there was no stall, and None without the metric.
        """
        async with httpx.AsyncClient(timeout=STOP_S) as http:
            headers = {"authorization": f"Bearer {self.tokens.secret['monitor']}"}
            text = (await http.get(f"http://{self.router.http}/metrics", headers=headers)).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        ends = sorted(
            (float(one.labels["le"]), one.value) for one in samples if one.name == f"{STALL}_bucket"
        )
        if not ends:
            return None
        now = {
            end: count - before
            for (end, count), (_, before) in zip(ends, [(0.0, 0.0), *ends[:-1]], strict=True)
        }
        grown = [end for end, count in now.items() if count > self.stalls.get(end, 0.0)]
        self.stalls = now
        return max(grown, default=0.0)


@dataclass(slots=True)
class Seen:
    """Results of the victim."""

    ttft: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """Returns a percentile of TTFT in seconds; infinite without any answer."""
        return percentile(sorted(self.ttft), percent) if self.ttft else math.inf


async def victim(cluster: Cluster, seconds: float) -> Seen:
    """Sends RATE requests per second, in an open loop."""
    seen = Seen()
    token = cluster.tokens.secret["victim"]
    async with AsyncExitStack() as exits:
        http = await exits.enter_async_context(
            httpx.AsyncClient(timeout=STOP_S, headers={"authorization": f"Bearer {token}"})
        )
        # The kernel draws a gRPC server for each.
        clients = [
            await exits.enter_async_context(
                kvrelay.AsyncClient(
                    cluster.router.grpc, token=token, retry=kvrelay.RetryPolicy(max_attempts=1)
                )
            )
            for _ in range(CONNECTIONS)
        ]
        requests = await exits.enter_async_context(asyncio.TaskGroup())
        start = time.perf_counter()
        draw = random.Random(0)
        for number in range(round(seconds * RATE)):
            # At random moments: a fixed interval would always meet the workers' steps, 10 ms apart,
            # at the same point.
            moment = start + (number + draw.random()) / RATE
            await asyncio.sleep(moment - time.perf_counter())
            ask = (
                over_http(http, cluster.router.http, number)
                if number % 2
                else over_grpc(clients[number // 2 % CONNECTIONS], number)
            )
            requests.create_task(measured(ask, seen))
    return seen


async def measured(first_token: Any, seen: Seen) -> None:
    """Awaits one request and records its TTFT or its error."""
    begun = time.perf_counter()
    try:
        at = await first_token
        seen.ttft.append(at - begun)
    except (httpx.HTTPError, kvrelay.KvRelayError, AssertionError) as error:
        seen.failed.append(f"{type(error).__name__}: {error!s:.100}")


async def over_http(http: httpx.AsyncClient, address: str, number: int) -> float:
    """Sends a request over HTTP and reads the whole answer. Returns the time of the first token."""
    body = {
        "model": "demo",
        "prompt": [*PROMPT, 8 + number % 300],
        "max_tokens": TOKENS,
        "stream": True,
    }
    first = None
    async with http.stream(
        "POST", f"http://{address}/v1/completions", json=body | {"ignore_eos": True}
    ) as answer:
        assert answer.status_code == 200, answer.status_code
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: {"):
                first = time.perf_counter()
    assert first is not None, "the answer has no token"
    return first


async def over_grpc(client: kvrelay.AsyncClient, number: int) -> float:
    """Sends a request over gRPC and reads the whole answer. Returns the time of the first token."""
    first = None
    prompt = [*PROMPT, 8 + number % 300]
    async with client.generate(
        token_ids=prompt, max_tokens=TOKENS, ignore_eos=True, timeout=STOP_S
    ) as stream:
        async for event in stream:
            if first is None and event.token_ids:
                first = time.perf_counter()
    assert first is not None, "the answer has no token"
    return first


@asynccontextmanager
async def attacking(name: str, cluster: Cluster) -> AsyncIterator[None]:
    """Runs an attack in a separate process. Yields SETTLE_S after its start."""
    words = (name, cluster.router.http, cluster.router.grpc)
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent(sys.executable, __file__, "--attack", *words),
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    # On stdin, because other processes can read the arguments.
    process.stdin.write(cluster.tokens.secret["hostile"].encode() + b"\n")
    await process.stdin.drain()
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        send_signal(process, signal.SIGKILL)
        await process.wait()


async def attack(name: str, http: str, grpc: str) -> None:
    """Runs one attack of the catalogue until the process is killed."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    token = sys.stdin.readline().strip()
    what, connections = CATALOGUE[name]
    await hostile_attacks.run(what, Target(http, grpc, token), connections)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Cluster]:
    """Yields a cluster. The router has a core of its own if there are several."""
    cores = os.sched_getaffinity(0)
    core = max(cores)
    if len(cores) > 1:
        os.sched_setaffinity(0, cores - {core})
    tokens = Tokens(folder)
    async with mock_cluster(POOLS, core, tokens_file=tokens.path) as router:
        cluster = Cluster(router, tokens)
        watch = asyncio.create_task(cluster.watch())
        yield cluster
        watch.cancel()
        await asyncio.wait([watch])


async def revocation_s(cluster: Cluster) -> float:
    """Returns the seconds from the removal of a token from the tokens file to the last accepted
    request with this token.

    Sends a request every 50 ms. A rejection may arrive late, because the router answers requests
    without a valid token one after the other.
    """
    served_s = 0.0
    refused = asyncio.Event()

    async def ask(http: httpx.AsyncClient, sent_s: float) -> None:
        nonlocal served_s
        headers = {"authorization": f"Bearer {cluster.tokens.secret['hostile']}"}
        if (
            await http.get(f"http://{cluster.router.http}/version", headers=headers)
        ).status_code == 401:
            refused.set()
        else:
            served_s = max(served_s, sent_s)

    async with httpx.AsyncClient(timeout=STOP_S, limits=httpx.Limits(max_connections=None)) as http:
        begun = time.perf_counter()
        cluster.tokens.write(["victim", "monitor"])
        async with asyncio.TaskGroup() as asking:
            while not refused.is_set():
                asking.create_task(ask(http, time.perf_counter() - begun))
                await asyncio.sleep(0.05)
    return served_s


def row(name: str, seen: Seen, solo: Seen, stall_s: float | None, cluster: Cluster) -> str:
    """Formats one row of the table."""
    p50, p99 = (seen.percentile(percent) for percent in (50, 99))
    stall = "-" if stall_s is None else f"<= {stall_s * 1000:.0f}" if stall_s else "none"
    ratio = p99 / solo.percentile(99)
    resident = cluster.peak_bytes / 2**20
    cells = (
        f"{p50 * 1000:.1f}",
        f"{p99 * 1000:.1f}",
        f"{ratio:.1f}",
        len(seen.failed),
        stall,
        f"{resident:.0f}",
    )
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


async def main(seconds: float, names: list[str]) -> None:
    """Runs the attacks and prints the table."""
    print(f"{processor_name()}; {len(os.sched_getaffinity(0))} cores, one reserved for the router")
    print(f"victim: {RATE:g} requests/s, {seconds:g} s per row\n")
    print(
        "| attack | victim TTFT p50, ms | p99, ms | p99 / p99 without attack | failed | "
        "worst stall, ms | router peak, MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="kvrelay-hostile-") as folder:
        async with running(Path(folder)) as cluster:
            await victim(cluster, 3.0)
            await cluster.worst_stall_s()
            solo = await victim(cluster, seconds)
            print(row("none", solo, solo, await cluster.worst_stall_s(), cluster), flush=True)
            for name in names:
                cluster.peak_bytes = 0
                async with attacking(name, cluster):
                    seen = await victim(cluster, seconds)
                    stall_s = await cluster.worst_stall_s()
                print(row(name, seen, solo, stall_s, cluster), flush=True)
                for failure in sorted(set(seen.failed))[:3]:
                    print(f"  {failure}", file=sys.stderr)
                await asyncio.sleep(SETTLE_S)
            for name in [one for one in ("json duplicate keys", "http long text") if one in names]:
                async with attacking(name, cluster):
                    print(
                        f"\nrevoked token accepted for {await revocation_s(cluster):.2f} s "
                        f"during: {name}"
                    )
                cluster.tokens.write(cluster.tokens.secret)
                await asyncio.sleep(SETTLE_S)
            async with attacking(names[0], cluster):
                begun = time.perf_counter()
                code = await cluster.router.end(STOP_S)
                print(
                    f"exit code {code} {time.perf_counter() - begun:.1f} s after SIGTERM "
                    f"during: {names[0]}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="Measured seconds per attack.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(CATALOGUE),
        default=list(CATALOGUE),
        help="Attacks to run.",
    )
    parser.add_argument(
        "--attack", nargs=3, metavar=("NAME", "HTTP", "GRPC"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(*options.attack))
    else:
        asyncio.run(main(options.seconds, options.only))
