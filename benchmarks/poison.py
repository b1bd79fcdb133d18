"""Sends poisoned requests that try to break a step, and checks that concurrent streams are not
affected: `python benchmarks/poison.py`.

The cluster runs as under `kvrelay serve`, with a copy of the demo model in which the embedding of
one token is NaN. A sequence with this token has no next token. Clients send many poisoned requests
over gRPC and HTTP while other clients read streams. Each stream is compared, token by token, with
the answer of the same request before the first poisoned request. The exit code is 1 if a stream
fails or differs, if a poisoned request ends in an unexpected way, or if a worker dies or leaks a
block.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import httpx
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import kvrelay.models
from kvrelay.config.config_file import load_config
from kvrelay.errors import Code
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.wire import cluster, inference

# A token of the demo model. Its embedding is NaN in the copy.
NAN_TOKEN = 2047
# Prompts are drawn from the tokens below this bound, whose embeddings are finite.
VOCAB = 2000
STREAM_TOKENS = 64
TIMEOUT_S = 600.0
WHOLE = "whole"
ENDPOINTS = ("grpc", "http")

log = Console(stderr=True)


def poisoned_model(folder: Path) -> Path:
    """Writes a copy of the demo model in which the input embedding of NAN_TOKEN is NaN. The output
    embedding stays as it is, so the model can sample the token.
    """
    shutil.copytree(Path(kvrelay.models.__file__).parent / "demo", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[NAN_TOKEN] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for either endpoint."""

    token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    kind: str = "stream"
    # The allowed outcomes: WHOLE, or names of error codes.
    ends: tuple[str, ...] = (WHOLE,)


@dataclass(frozen=True, slots=True)
class End:
    """The outcome of a request, and the tokens that it received."""

    status: str
    token_ids: tuple[int, ...] = ()
    message: str = ""


# Streams


def streams(count: int, seed: int) -> list[Ask]:
    """Returns `count` requests with greedy and random sampling, penalties, and top-k and top-p.
    Some prompts are long enough for a hand-off.
    """
    draw = random.Random(seed)
    asks = []
    for number in range(count):
        sampling: dict[str, Any] = {
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "seed": number,
            "temperature": (0.0, 1.0, 0.7)[number % 3],
            # A stream that samples NAN_TOKEN would fail by itself.
            "logit_bias": {NAN_TOKEN: -100.0},
        }
        if number % 4 == 1:
            sampling |= {"top_p": 0.9, "frequency_penalty": 0.3}
        if number % 4 == 2:
            sampling |= {"top_k": 40, "repetition_penalty": 1.1}
        asks.append(Ask(_prompt(draw, draw.choice((12, 40, 120, 250))), sampling))
    return asks


# Poisoned requests. Each function returns a request with its allowed outcomes.


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(10, VOCAB) for _ in range(length))


def nan_in_prompt(draw: random.Random) -> Ask:
    """The prompt contains NAN_TOKEN."""
    prompt = list(_prompt(draw, draw.choice((8, 80))))
    prompt[draw.randrange(len(prompt))] = NAN_TOKEN
    return Ask(
        tuple(prompt),
        {"max_tokens": 8, "temperature": 1.0},
        "NaN from a prompt token",
        ("INTERNAL",),
    )


def nan_while_decoding(draw: random.Random) -> Ask:
    """The first sampled token is NAN_TOKEN, so the next step computes NaN."""
    sampling = {"max_tokens": 8, "temperature": 0.0, "logit_bias": {NAN_TOKEN: 100.0}}
    return Ask(
        _prompt(draw, draw.choice((8, 80))), sampling, "NaN from a decoded token", ("INTERNAL",)
    )


def refused_value(draw: random.Random) -> Ask:
    """A sampling option is out of range."""
    name, value = draw.choice(
        [
            *(("repetition_penalty", one) for one in (1e-38, 5e-324, 0.0, -1.0, 1e30)),
            *(("temperature", one) for one in (-1e-300, 1e30, 101.0)),
            *((name, one) for name in ("top_p", "min_p") for one in (-1e-300, 1.0000001, 1e30)),
            *(
                (name, one)
                for name in ("presence_penalty", "frequency_penalty")
                for one in (2.1, -1e30)
            ),
            *(
                ("logit_bias", {token: bias})
                for token, bias in ((5, 1e30), (2048, 1.0), (2**31 - 1, 1.0))
            ),
            *(("stop_token_ids", [one]) for one in (2048, 2**31 - 1)),
            ("logprobs", 21),
            ("max_tokens", 0),
        ]
    )
    sampling = {"max_tokens": 8, "temperature": 1.0} | {name: value}
    return Ask(_prompt(draw, 8), sampling, "rejected values", ("INVALID_ARGUMENT",))


def extreme_value(draw: random.Random) -> Ask:
    """The values are allowed, but near or beyond the limits of float32."""

    def tiny() -> float:
        return draw.choice((5e-324, 1e-310, 1e-300, 1e-45, 1e-38, 1e-10))

    sampling: dict[str, Any] = {
        "max_tokens": 4,
        "seed": draw.randrange(2**63),
        "temperature": draw.choice((0.0, tiny(), tiny(), 1e-5, 100.0)),
        "top_p": draw.choice((1.0, tiny(), 0.9999999999)),
        "top_k": draw.choice((0, 1, 2**31 - 1)),
        "min_p": draw.choice((0.0, 1.0, tiny())),
        "presence_penalty": draw.choice((0.0, -2.0, 2.0, tiny())),
        "frequency_penalty": draw.choice((0.0, -2.0, 2.0, tiny())),
        "repetition_penalty": draw.choice((1.0, 0.01, 100.0)),
        "min_tokens": draw.choice((0, 4)),
        "logit_bias": {
            draw.randrange(VOCAB): draw.choice((-100.0, 100.0, tiny())) for _ in range(20)
        }
        | {NAN_TOKEN: -100.0},
    }
    return Ask(_prompt(draw, draw.choice((4, 80))), sampling, "allowed extremes", (WHOLE,))


POISONS: Sequence[Callable[[random.Random], Ask]] = (
    nan_in_prompt,
    nan_while_decoding,
    refused_value,
    extreme_value,
)

# Endpoints


class GrpcEndpoint:
    """Streams over gRPC."""

    name = "grpc"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference.InferenceServiceStub(channel)

    async def ask(self, ask: Ask) -> End:
        sampling = ask.sampling | {"logit_bias": tuple(ask.sampling.get("logit_bias", {}).items())}
        options = inference.SamplingOptions(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in sampling.items()
            }
        )
        request = inference.GenerateRequest(token_ids=ask.token_ids, sampling=options)
        token_ids: list[int] = []
        try:
            async for message in self._stub.Generate(
                inference.request_to_proto(request), timeout=TIMEOUT_S
            ):
                assert message.index == len(token_ids), "a token is missing or repeated"
                token_ids += message.token_ids
        except grpc.aio.AioRpcError as error:
            return End(error.code().name, tuple(token_ids), error.details() or "")
        return End(WHOLE, tuple(token_ids))


class HttpEndpoint:
    """Streams over HTTP, so a failure can follow the first token."""

    name = "http"

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def ask(self, ask: Ask) -> End:
        sampling = dict(ask.sampling)
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {
                str(token): bias for token, bias in sampling["logit_bias"].items()
            }
        body = {
            "model": self._model,
            "prompt": ask.token_ids,
            "stream": True,
            "return_token_ids": True,
        } | sampling
        token_ids: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return _failed(response.json(), token_ids)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return End(WHOLE, tuple(token_ids))
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return _failed(event, token_ids)
                    for choice in event["choices"]:
                        token_ids += choice.get("token_ids") or ()
        return End("incomplete", tuple(token_ids))


def _failed(document: Any, token_ids: list[int]) -> End:
    error = document["error"]
    name = next(
        (code.name for code in Code if code.openai_type == error["type"]), str(error["type"])
    )
    return End(name, tuple(token_ids), str(error["message"]))


Endpoint = GrpcEndpoint | HttpEndpoint


@asynccontextmanager
async def endpoints(target: str, url: str) -> AsyncIterator[tuple[Endpoint, ...]]:
    """Yields the gRPC and the HTTP endpoint of a router."""
    limits = httpx.Limits(max_connections=None)
    async with (
        grpc.aio.insecure_channel(target) as channel,
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        yield GrpcEndpoint(channel), HttpEndpoint(client, model)


# The run


@dataclass
class Found:
    """Results of a run."""

    # By endpoint: streams with the expected tokens.
    streams: Counter[str] = field(default_factory=Counter)
    stream_tokens: int = 0
    # By kind, endpoint and outcome.
    poison: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


async def beside(
    both: Sequence[Endpoint],
    num_poisoned: int,
    num_streams: int,
    *,
    at_once: int,
    seed: int,
    tell: Callable[[str], None],
) -> Found:
    """Sends `num_poisoned` poisoned requests, `at_once` at a time, while `num_streams` streams run.
    A stream restarts when it ends.

    Poisoned requests and streams alternate between the endpoints.
    """
    found = Found()
    asks = streams(num_streams, seed)
    tell(f"recording {num_streams} streams, one at a time")
    expected = await _learn(both, asks)
    draw = random.Random(seed)
    left = num_poisoned
    over = asyncio.Event()
    started = time.perf_counter()

    async def stream(number: int) -> None:
        times = 0
        while not over.is_set() or not times:
            endpoint = both[(number + times) % len(both)]
            times += 1
            end = await endpoint.ask(asks[number])
            if end == End(WHOLE, expected[number]):
                found.streams[endpoint.name] += 1
                found.stream_tokens += len(end.token_ids)
            else:
                same = sum(a == b for a, b in zip(end.token_ids, expected[number], strict=False))
                what = f"{end.status} {end.message}, {same} of {len(expected[number])} tokens equal"
                found.wrong.append(f"stream {number} over {endpoint.name}: {what}")

    async def poison() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            endpoint, ask = both[left % len(both)], draw.choice(POISONS)(draw)
            end = await endpoint.ask(ask)
            found.poison[ask.kind, endpoint.name, end.status] += 1
            if end.status not in ask.ends:
                found.wrong.append(
                    f"{ask.kind} over {endpoint.name}: {end.status} {end.message}: {ask.sampling}"
                )
            if sum(found.poison.values()) % 500 == 0:
                tell(
                    f"{left} poisoned requests left; {sum(found.streams.values())} streams complete"
                )

    async def all_poison() -> None:
        try:
            await _all(poison() for _ in range(at_once))
        finally:
            over.set()

    await _all([all_poison(), *(stream(number) for number in range(num_streams))])
    found.seconds = time.perf_counter() - started
    return found


async def _learn(both: Sequence[Endpoint], asks: Sequence[Ask]) -> list[tuple[int, ...]]:
    """Records the expected tokens, without poisoned requests, one at a time, over both
    endpoints.
    """
    expected = []
    for ask in asks:
        first, *others = [await endpoint.ask(ask) for endpoint in both]
        assert first.status == WHOLE, first
        assert all(one == first for one in others), "the answers of the endpoints differ"
        expected.append(first.token_ids)
    return expected


async def _all(work: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)


async def state(admin: str) -> cluster.ClusterStatus:
    """Reads the status of the cluster."""
    async with grpc.aio.insecure_channel(admin) as channel:
        answer = await cluster.ClusterServiceStub(channel).GetStatus(cluster.pb.GetStatusRequest())
    return cluster.cluster_status_from_proto(answer)


def workers_of(status: cluster.ClusterStatus) -> dict[str, cluster.WorkerStatus]:
    """Returns all workers by id."""
    return {worker.worker_id: worker for pool in status.pools for worker in pool.workers}


async def check_workers(
    ask: Callable[[], Awaitable[cluster.ClusterStatus]], epochs: dict[str, int]
) -> list[str]:
    """Waits until the workers are idle. Returns an error for each death and each leaked block."""
    wrong = []
    async with asyncio.timeout(60):
        # The state is in other processes, so there is no event to wait for.
        while any(not one.load.empty for one in workers_of(await ask()).values()):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        # Time for a heartbeat after the consistency check.
        await asyncio.sleep(2.0)
    status = workers_of(await ask())
    if found := {name: one.epoch for name, one in status.items()} != epochs:
        wrong.append(f"workers died: epochs were {epochs}, now {found}")
    for name, one in status.items():
        if one.load.blocks_held or not one.load.integrity_ok:
            wrong.append(f"{name} holds {one.load.blocks_held} blocks; {one.load.integrity_error}")
    return wrong


def table(found: Found) -> Table:
    """Returns the counts as a table."""
    shown = Table("requests", "endpoint", "outcome", "count")
    for (kind, endpoint, status), count in sorted(found.poison.items()):
        shown.add_row(kind, endpoint, status, f"{count:,}")
    for endpoint, count in sorted(found.streams.items()):
        shown.add_row("streams", endpoint, "complete and equal", f"{count:,}")
    failed = sum(one.startswith("stream") for one in found.wrong)
    shown.add_row("streams", "both", "failed or different", f"{failed:,}")
    return shown


async def run(
    poisoned: int, num_streams: int, at_once: int, prefill: int, decode: int, dtype: str, seed: int
) -> Found:
    """Runs a cluster and the whole benchmark."""
    with tempfile.TemporaryDirectory(prefix="poison-") as folder:
        wanted: dict[str, object] = {
            **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
            "model.path": str(poisoned_model(Path(folder))),
            "model.dtype": dtype,
            "kv.memory": "256MiB",
            "prefill.replicas": prefill,
            "decode.replicas": decode,
            "decode.max_batch": 64,
        }
        async with LocalCluster(load_config(None, wanted), quiet=True) as running:
            ends = running.endpoints
            epochs = {name: one.epoch for name, one in workers_of(await state(ends.admin)).items()}
            async with endpoints(ends.grpc, ends.http) as both:
                found = await beside(
                    both, poisoned, num_streams, at_once=at_once, seed=seed, tell=log.print
                )
            found.wrong += await check_workers(lambda: state(ends.admin), epochs)
            return found


def main(
    poisoned: Annotated[int, typer.Option(min=1, help="Number of poisoned requests.")] = 10_000,
    streams: Annotated[
        int, typer.Option("--streams", min=1, help="Number of concurrent streams.")
    ] = 100,
    at_once: Annotated[
        int, typer.Option(min=1, help="Number of concurrent poisoned requests.")
    ] = 32,
    prefill: Annotated[int, typer.Option(min=0)] = 1,
    decode: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the model: auto, float32 or bfloat16.")
    ] = "auto",
    seed: Annotated[int, typer.Option()] = 0,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Run the benchmark. The exit code is 1 if a stream fails or differs, or a poisoned request
    ends in an unexpected way.
    """
    found = asyncio.run(run(poisoned, streams, at_once, prefill, decode, dtype, seed))
    Console(width=110).print(table(found))
    rate = sum(found.poison.values()) / found.seconds
    tokens = found.stream_tokens / found.seconds
    print(f"{found.seconds:.0f} s: {rate:.1f} poisoned requests/s and {tokens:.0f} stream tokens/s")
    for one in found.wrong[:20]:
        print(one, file=sys.stderr)
    if file is not None:
        document = {
            "streams": dict(found.streams),
            "stream_tokens": found.stream_tokens,
            "poison": [[*key, count] for key, count in sorted(found.poison.items())],
            "wrong": found.wrong,
            "seconds": found.seconds,
        }
        file.write_text(json.dumps(document, indent=1) + "\n")
    if found.wrong:
        print(f"{len(found.wrong)} violations", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
