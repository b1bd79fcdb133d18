"""Runs client libraries from PyPI against a cluster, undisturbed and while a decode worker is
killed in the middle of an answer, and compares the answers.

python benchmarks/clients/run_clients.py
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

# Makes the modules of the other benchmarks importable.
sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import httpx
import typer
from case_table import CaseRow, case_table
from client_list import CLIENTS
from client_process import CaseResult, ClientProcess, client_process
from rich.console import Console
from tool_environment import LOG, fresh_folder, install, version
from worker_kill import ClusterWatch, run_with_kill

from kvrelay.config.model_sections import RouterConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.wire.cluster import ClusterServiceStub

CACHE = Path("~/.cache/kvrelay/clients")
DECODE = 2
# Limit on one run of a case.
WITHIN_S = 120.0
# Runs with a kill until one of them meets a request that is running.
TRIES = 8

log = Console(stderr=True)


def main(
    client: Annotated[
        # typer requires a list as the default.
        list[str],
        typer.Option(metavar="|".join(CLIENTS), help="Library to run; repeatable."),
    ] = list(CLIENTS),  # noqa: B006
    case: Annotated[
        list[str] | None, typer.Option(help="Case to run; repeatable. Default: all.")
    ] = None,
    kill: Annotated[bool, typer.Option(help="Kill a decode worker in each case.")] = True,
    attempts: Annotated[
        int,
        typer.Option(
            min=1, help="router.max_attempts. With 1 the router does not retry, so kills show."
        ),
    ] = RouterConfig().max_attempts,
    model: Annotated[str, typer.Option(help="Folder of the model, or demo.")] = "demo",
    cache: Annotated[Path, typer.Option(help="Folder for the libraries' environments.")] = CACHE,
    out: Annotated[Path, typer.Option(help="Folder for the logs of the scripts.")] = Path(
        "client-logs"
    ),
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Run each case of each library. The exit code is 1 if a case fails or an answer differs."""
    if unknown := set(client) - CLIENTS.keys():
        raise typer.BadParameter(
            f"--client {unknown.pop()} is unknown; allowed are {', '.join(CLIENTS)}."
        )
    rows: list[CaseRow] = []

    def save() -> None:
        if file is not None:
            document = {"model": model, "cases": [asdict(row) for row in rows]}
            file.write_text(json.dumps(document, indent=1) + "\n")

    try:
        pythons = {}
        for name in client:
            log.print(f"{name}: installing, unless cached")
            pythons[name] = install(CLIENTS[name], cache.expanduser())
        run = _run(
            pythons, frozenset(case or ()), kill, attempts, model, fresh_folder(out), rows, save
        )
        asyncio.run(run)
    except KvRelayError as error:
        raise SystemExit(f"run_clients.py: {error.message}") from None
    except TimeoutError:
        raise SystemExit(
            f"run_clients.py: the workers were not ready in time; see {out / LOG}"
        ) from None
    finally:
        Console(width=160).print(case_table(rows))
    if not rows or not all(row.passed for row in rows):
        raise typer.Exit(1)


async def _run(
    pythons: dict[str, Path],
    only: frozenset[str],
    kill: bool,
    attempts: int,
    model: str,
    out: Path,
    rows: list[CaseRow],
    save: Callable[[], None],
) -> None:
    """Adds the row of each case to `rows`, and calls save() after each."""
    config = ClusterConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "prefill": {"replicas": 1, "threads": 1},
            "decode": {"replicas": DECODE, "threads": 1},
            "router": {"max_attempts": attempts},
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
        }
    )
    async with (
        LocalCluster(config, log_path=out / LOG) as cluster,
        httpx.AsyncClient(base_url=cluster.endpoints.http) as http,
        grpc.aio.insecure_channel(cluster.endpoints.admin) as admin,
    ):
        watch = ClusterWatch(http, ClusterServiceStub(admin))
        served = (await http.get("/v1/models")).json()["data"][0]["id"]
        for name, python in pythons.items():
            head = CaseRow(name, version(CLIENTS[name], python), "", 0, "")
            script, url = CLIENTS[name].path, cluster.endpoints.http
            async with client_process(python, script, url, served, out / f"{name}.log") as client:
                for case in await client.cases():
                    if not only or case in only:
                        row = await _row(client, watch, replace(head, case=case), kill)
                        log.print(f"{name}: {case}: {row.undisturbed}; {row.with_a_kill}")
                        rows.append(row)
                        save()


async def _row(client: ClientProcess, watch: ClusterWatch, row: CaseRow, kill: bool) -> CaseRow:
    """Runs one case."""
    await watch.idle(DECODE)
    before = await watch.tokens()
    whole = await client.run(row.case, WITHIN_S)
    row = replace(row, tokens=await watch.tokens() - before, error=whole.error)
    if row.error or not row.tokens or not kill:
        return row
    for number in range(TRIES):
        workers = await watch.idle(DECODE, settled=True)
        # The kill takes effect some tokens later, on a busy machine more.
        middle = row.tokens // (3 + number)
        found, moved = await run_with_kill(client, row.case, watch, workers, middle, WITHIN_S)
        row = replace(row, killed=moved > 0, kill_error=found.error, same=_same(whole, found))
        if row.killed or found.error:
            break
    return row


def _same(one: CaseResult, other: CaseResult) -> bool:
    return not other.error and one.answer == other.answer


if __name__ == "__main__":
    typer.run(main)
