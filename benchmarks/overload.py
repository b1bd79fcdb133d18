"""Measures the goodput of a router under a load that exceeds the capacity of its workers.

    python benchmarks/overload.py --seconds 40

The router runs in its own process. The requests arrive over gRPC and have deadlines. The workers
are mocks without an engine: a step takes STEP_S and gives each of SLOTS sequences a token. So the
capacity is the same on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, field
from random import Random

import grpc

from kvrelay.bench.router.mock_cluster import MockPools, mock_cluster
from kvrelay.errors import ResourceExhausted
from kvrelay.percentiles import percentile
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceStub,
    SamplingOptions,
    pb,
    request_to_proto,
)
from kvrelay.wire.status import error_from_rpc

DECODE, SLOTS, STEP_S = 2, 16, 0.02
# Bounds of a uniform distribution.
OUTPUT_TOKENS = (32, 96)
# Requests per second.
CAPACITY = DECODE * SLOTS / STEP_S / (sum(OUTPUT_TOKENS) / 2)
PROMPT = tuple(range(10, 30))
WARM_UP_S = 15.0
LOADS = (0.5, 1.0, 2.0, 3.0)
TOKEN = 20


@dataclass(slots=True)
class Outcome:
    """Counts of the requests that arrived in the measured time."""

    offered: int = 0
    # Requests that were answered completely before their deadline, and their tokens.
    whole: int = 0
    tokens: int = 0
    # Requests whose deadline passed after the first token. Their work is wasted.
    cut_off: int = 0
    # Requests whose deadline passed before the first token.
    late: int = 0
    # Seconds until a request was rejected.
    refusals: list[float] = field(default_factory=list)
    # Retry delays that the rejections suggested, in seconds.
    delays: list[float] = field(default_factory=list)


async def ask(stub: InferenceServiceStub, tokens: int, deadline_s: float, outcome: Outcome) -> None:
    """Sends one request and counts its outcome."""
    sampling = SamplingOptions(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    outcome.offered += 1
    begun, received = time.perf_counter(), 0
    call: grpc.aio.UnaryStreamCall = stub.Generate(
        request_to_proto(GenerateRequest(token_ids=PROMPT, sampling=sampling)), timeout=deadline_s
    )
    try:
        message: pb.GenerateResponse
        async for message in call:
            received += len(message.token_ids)
        if received == tokens:
            outcome.whole += 1
            outcome.tokens += tokens
    except grpc.aio.AioRpcError as error:
        kind = error_from_rpc(error)
        if isinstance(kind, ResourceExhausted):
            outcome.refusals.append(time.perf_counter() - begun)
            outcome.delays.append(kind.retry_after_s or 0.0)
        elif received:
            outcome.cut_off += 1
        else:
            outcome.late += 1


async def offer(target: str, load: float, seconds: float, deadline_s: float) -> Outcome:
    """Sends requests with Poisson arrivals in an open loop. Returns the counts after the
    warm-up.
    """
    random = Random(round(load * 1000))
    measured, warming = Outcome(), Outcome()
    async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as requests:
        stub = InferenceServiceStub(channel)
        start = due = time.perf_counter()
        while due < start + WARM_UP_S + seconds:
            await asyncio.sleep(due - time.perf_counter())
            outcome = measured if due >= start + WARM_UP_S else warming
            requests.create_task(ask(stub, random.randint(*OUTPUT_TOKENS), deadline_s, outcome))
            due += random.expovariate(load * CAPACITY)
    return measured


async def main(seconds: float, deadline_s: float) -> None:
    """Runs all loads and prints the table."""
    rate = DECODE * SLOTS / STEP_S
    print(
        f"{DECODE} workers with {SLOTS} batch slots, {STEP_S * 1000:g} ms per step: {rate:,.0f} "
        "tokens/s"
    )
    print(f"deadline {deadline_s:g} s; {seconds:g} s per load, after {WARM_UP_S:g} s warm-up\n")
    print(
        "| offered | complete in time | goodput, tokens | cut off | late | rejected | "
        "time to rejection p50, ms | p99, ms | retry after, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    pools = MockPools(prefill=0, decode=DECODE, slots=SLOTS, step_s=STEP_S, token=TOKEN)
    async with mock_cluster(pools, core=max(os.sched_getaffinity(0))) as router:
        for load in LOADS:
            one = await offer(router.grpc, load, seconds, deadline_s)
            told = "| - | - | - |"
            if one.refusals:
                seconds_to_refusal = sorted(one.refusals)
                delays = f"{min(one.delays):.1f} to {max(one.delays):.1f}"
                p50, p99 = (percentile(seconds_to_refusal, percent) for percent in (50, 99))
                told = f"| {p50 * 1000:.1f} | {p99 * 1000:.1f} | {delays} |"
            print(
                f"| {load:g}×, {one.offered / seconds:.1f}/s | {one.whole / seconds:.1f}/s "
                f"| {one.tokens / seconds:,.0f}/s | {one.cut_off} | {one.late} | "
                f"{len(one.refusals)} {told}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="Measured seconds per load.")
    parser.add_argument(
        "--deadline", type=float, default=6.0, help="Deadline of each request, in seconds."
    )
    given = parser.parse_args()
    asyncio.run(main(given.seconds, given.deadline))
