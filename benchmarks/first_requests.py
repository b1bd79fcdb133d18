"""Compares the first request of each kind on a freshly started cluster with its tenth.

    python benchmarks/first_requests.py

Each kind gets clusters of its own, so nothing that an earlier kind warmed up helps it. Figures are
medians over the clusters: until the first text, and from the first text to the next, which is what
a client sees of the hand-off. Prompts of a kind have the same length and no common prefix. All
kinds take about half an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvrelay.cli.options.cluster import OWN_CLUSTER
from kvrelay.config.config_file import load_config
from kvrelay.launch.local_cluster import LocalCluster

Body = dict[str, Any]
# The request whose time counts as the usual one is the median of the last REPEATS requests.
REQUESTS, REPEATS = 12, 5
LONG, SHORT = 200, 12
WORDS = (
    "girl",
    "dog",
    "forest",
    "river",
    "bread",
    "small",
    "warm",
    "coat",
    "house",
    "door",
    "king",
)
OPTIONS: Body = {"max_tokens": 16, "temperature": 0, "stream": True}


def words(random: Random, count: int) -> str:
    """`count` random words, one or two tokens each."""
    return " ".join(random.choice(WORDS) for _ in range(count))


def completion(count: int, **options: object) -> Callable[[Random], tuple[str, Body]]:
    """A request to /v1/completions with a prompt of `count` words."""
    return lambda random: (
        "/v1/completions",
        {**OPTIONS, "prompt": words(random, count), **options},
    )


def chat(count: int, **options: object) -> Callable[[Random], tuple[str, Body]]:
    """A request to /v1/chat/completions with a message of `count` words."""
    return lambda random: (
        "/v1/chat/completions",
        {**OPTIONS, "messages": [{"role": "user", "content": words(random, count)}], **options},
    )


def new_tool(random: Random) -> tuple[str, Body]:
    """A chat with a tool that no request had before. A template puts tools first, so a known tool
    would be found in the prefix cache.
    """
    function = {
        "name": f"tool_{random.randrange(10**9)}",
        "description": words(random, LONG // 4),
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
    return chat(LONG, tools=[{"type": "function", "function": function}])(random)


def new_schema(random: Random) -> tuple[str, Body]:
    """A chat whose answer follows a JSON schema that no request had before."""
    properties = {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": random.randrange(10**9)},
    }
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    return chat(LONG, response_format=asked)(random)


KINDS: dict[str, Callable[[Random], tuple[str, Body]]] = {
    "text, disaggregated": completion(LONG),
    "text, local": completion(SHORT),
    "text, sampled": completion(LONG, temperature=1, top_p=0.9, top_k=50, seed=1),
    "text, penalties": completion(LONG, frequency_penalty=0.5, logit_bias={"5": 1}),
    "text, logprobs": completion(LONG, logprobs=5),
    "text, prompt scores": completion(LONG, logprobs=1, echo=True, stream=False),
    "chat, disaggregated": chat(LONG),
    "chat, local": chat(SHORT),
    "chat with tools": new_tool,
    "JSON schema": new_schema,
    "Responses": lambda random: (
        "/v1/responses",
        {
            "input": words(random, LONG),
            "max_output_tokens": 16,
            "temperature": 0,
            "stream": True,
        },
    ),
    "Messages": lambda random: (
        "/v1/messages",
        {**OPTIONS, "messages": [{"role": "user", "content": words(random, LONG)}]},
    ),
}


async def gaps(http: httpx.AsyncClient, path: str, body: Body) -> tuple[float, float | None]:
    """Seconds until the first event of the answer that carries text, or until the whole answer if
    none does, and from there to the next such event, if any.
    """
    texts = [time.perf_counter()]
    async with http.stream("POST", path, json={"model": "demo", **body}) as answer:
        if answer.status_code != 200:
            raise typer.BadParameter(f"{path}: {(await answer.aread()).decode()}")
        texts += [time.perf_counter() async for line in answer.aiter_lines() if has_text(line)]
    texts.append(time.perf_counter())
    return texts[1] - texts[0], texts[2] - texts[1] if len(texts) > 3 else None


def has_text(line: str) -> bool:
    """Tells whether an event carries a part of the answer, and not only its beginning."""
    if not line.startswith("data: {"):
        return False
    event = json.loads(line.removeprefix("data: "))
    if choices := event.get("choices"):
        delta = choices[0].get("delta", choices[0])
        return any(delta.get(key) for key in ("content", "text", "tool_calls", "reasoning_content"))
    return str(event.get("type", "")).endswith("delta")


async def measure(kind: str, random: Random) -> list[tuple[float, float | None]]:
    """`gaps` of each of REQUESTS requests on a new cluster, which finds no compiled kernels, as on
    a new machine.
    """
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        return await _measured(kind, random)


async def _measured(kind: str, random: Random) -> list[tuple[float, float | None]]:
    async with (
        LocalCluster(load_config(None, OWN_CLUSTER), quiet=True) as cluster,
        httpx.AsyncClient(base_url=cluster.endpoints.http, timeout=60) as http,
    ):
        # The connection is not what is measured.
        await http.get("/health")
        return [await gaps(http, *KINDS[kind](random)) for _ in range(REQUESTS)]


class Row:
    """One gap of one kind of request, in seconds: the first, the second, and the usual one. Each
    run has the gaps of REQUESTS requests.
    """

    def __init__(self, runs: list[list[float]]) -> None:
        self.first, self.second = (statistics.median(run[n] for run in runs) for n in (0, 1))
        self.usual = statistics.median(s for run in runs for s in run[-REPEATS:])

    @property
    def ratio(self) -> float:
        return self.first / self.usual

    def cells(self) -> list[str]:
        times = (self.first, self.second, self.usual)
        return [*(f"{1000 * s:.1f}" for s in times), f"{self.ratio:.2f}"]


def rows(runs: list[list[tuple[float, float | None]]]) -> dict[str, Row]:
    """Returns the rows of a kind by the name of the gap."""
    found = {"first text": Row([[first for first, _ in run] for run in runs])}
    nexts = [[gap for _, gap in run if gap is not None] for run in runs]
    if all(len(run) == REQUESTS for run in nexts):
        found["next text"] = Row(nexts)
    return found


def main(
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of request; repeatable. Default: all.")
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, help="Clusters started for each kind.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    limit: Annotated[float, typer.Option(help="Largest accepted ratio.")] = 1.5,
) -> None:
    """Measure each kind of request. The exit code is 1 if a ratio is larger than --limit."""
    if unknown := set(kind or ()) - KINDS.keys():
        raise typer.BadParameter(f"{unknown.pop()!r} is unknown; allowed are {', '.join(KINDS)}.")
    titles = ("first, ms", "second", f"median of the last {REPEATS}", "first / median")
    table = Table("kind", "until", *titles)
    random, slow = Random(seed), False
    for name in kind or KINDS:
        starts = track(range(clusters), name, console=Console(stderr=True))
        for until, row in rows([asyncio.run(measure(name, random)) for _ in starts]).items():
            table.add_row(name, until, *row.cells())
            slow |= row.ratio > limit
    Console().print(table)
    if slow:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
