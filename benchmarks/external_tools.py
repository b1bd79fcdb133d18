"""Runs load tools from PyPI against kvrelay and compares each with `kvrelay loadtest` for the same
load.

python benchmarks/external_tools.py --vllm-python /opt/vllm/bin/python
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from agreement import Comparison, agreement_table, compare
from load_tools import TOOLS, Load
from rich.console import Console
from tokenizers import Tokenizer
from tool_environment import LOG, fresh_folder, install, run, version

from kvrelay.bench.environment import model_folder
from kvrelay.config.config_file import load_config
from kvrelay.errors import KvRelayError, NotFound
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.report.report_file import load_report
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.senders.http_sender import HttpSender

CACHE = Path("~/.cache/kvrelay/load-tools")
# Requests.
_WARM_UP = 5
# Time that a tool may take in addition to its load.
_START_S = 300.0

log = Console(stderr=True)


def main(
    # typer requires a list as the default.
    tool: Annotated[
        list[str], typer.Option(metavar="|".join(TOOLS), help="Tool to run; repeatable.")
    ] = list(TOOLS),  # noqa: B006
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment that has vLLM.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="http://HOST:PORT", help="Server to test. Default: a local cluster."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Folder, demo or m200. With --target: folder of its tokenizer.")
    ] = "m200",
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="Endpoint that the tools use.")
    ] = False,
    rate: Annotated[float, typer.Option(help="Requests per second, at constant intervals.")] = 0.5,
    num_requests: Annotated[int, typer.Option(min=1)] = 60,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=2)] = 64,
    within: Annotated[
        float, typer.Option(help="Largest accepted difference of the medians, in per cent.")
    ] = 5.0,
    cache: Annotated[Path, typer.Option(help="Folder for the tools' environments.")] = CACHE,
    out: Annotated[
        Path, typer.Option(help="Folder for logs and for the result files of the tools.")
    ] = Path("external-tools"),
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Run each tool, with a kvrelay load test before and after it. The exit code is 1 if a request
    fails or a difference is larger than --within.
    """
    if unknown := set(tool) - TOOLS.keys():
        raise typer.BadParameter(
            f"--tool {unknown.pop()} is unknown; allowed are {', '.join(TOOLS)}."
        )
    if "vllm" in tool and vllm_python is None:
        raise typer.BadParameter("--tool vllm requires --vllm-python.")
    try:
        load = Load(
            "",
            "",
            model_folder(model),
            chat,
            rate,
            num_requests,
            prompt_tokens,
            output_tokens,
            seed=0,
        )
        pythons = {}
        for one in tool:
            log.print(f"{one}: installing, unless cached")
            given = vllm_python.absolute() if one == "vllm" and vllm_python else None
            pythons[one] = given or install(TOOLS[one], cache.expanduser())
        found = asyncio.run(_run(pythons, load, target, out))
    except KvRelayError as error:
        raise SystemExit(f"external_tools.py: {error.message}") from None
    Console(width=150).print(agreement_table(found))
    if file is not None:
        document = {"load": asdict(load), "tools": [asdict(one) for one in found]}
        file.write_text(json.dumps(document, indent=1) + "\n")
    if not all(one.agrees(num_requests, within) for one in found):
        raise typer.Exit(1)


async def _run(
    pythons: Mapping[str, Path], load: Load, target: str | None, out: Path
) -> list[Comparison]:
    found = []
    async with _served(load, target) as url:
        load = replace(load, url=url, model=await _model(url))
        # Every run has its own prompts, because a target may have a prefix cache.
        await _ours(replace(load, num_requests=_WARM_UP, seed=len(pythons) + 1), out / "warm-up")
        before = await _ours(load, out / "before")
        for number, (name, python) in enumerate(pythons.items(), start=1):
            log.print(f"{name}: {load.num_requests} requests")
            tool = TOOLS[name]
            folder = fresh_folder(out / name)
            await run(tool.command(python.parent, load, folder), folder / LOG, _longest_s(load))
            after = await _ours(replace(load, seed=number), out / f"after-{name}")
            found.append(
                compare(name, version(tool, python), tool.read(folder), tool.itl_of, before, after)
            )
            before = after
    return found


@asynccontextmanager
async def _served(load: Load, target: str | None) -> AsyncIterator[str]:
    """Yields the URL of the target, or of a local cluster that runs until exit."""
    if target is not None:
        yield target
        return
    wanted: dict[str, object] = {
        **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
        "model.path": load.tokenizer,
        # A run must not profit from the runs before it.
        "kv.prefix_cache": False,
    }
    async with LocalCluster(load_config(None, wanted), quiet=True) as cluster:
        yield cluster.endpoints.http


async def _model(url: str) -> str:
    async with HttpSender(url, timeout=30) as sender:
        models = await sender.models()
    if not models:
        raise NotFound(f"{url} serves no model")
    return models[0].id


async def _ours(load: Load, folder: Path) -> tuple[Row, ...]:
    """Runs `kvrelay loadtest run` in a separate process, like the tools. Raises Unavailable if a
    request fails.
    """
    result = fresh_folder(folder) / "result.json"
    words = Tokenizer.from_file(f"{load.tokenizer}/tokenizer.json").get_vocab_size()
    command = [
        *(sys.executable, "-m", "kvrelay.cli.main", "loadtest", "run", "--target", load.url),
        *(
            "--rate",
            str(load.rate),
            "--burstiness",
            "inf",
            "--num-requests",
            str(load.num_requests),
        ),
        *("--prompt-tokens", str(load.prompt_tokens), "--output-tokens", str(load.output_tokens)),
        *("--vocab-size", str(words), "--seed", str(load.seed), "--json", str(result)),
    ]
    await run(command, folder / LOG, _longest_s(load))
    return load_report(result).rows


def _longest_s(load: Load) -> float:
    return _START_S + 3 * load.num_requests / load.rate


if __name__ == "__main__":
    typer.run(main)
