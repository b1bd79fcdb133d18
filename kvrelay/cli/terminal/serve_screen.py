"""What `kvrelay serve` shows on a terminal: the progress of the start, and what to do next. The log
goes to a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from kvrelay.cli.terminal.notes import wrapped
from kvrelay.cli.views.worker_news import WorkerNews
from kvrelay.compiler.compiled import is_compiled
from kvrelay.config.listen import ListenConfig
from kvrelay.models import DEMO, TOKENIZER_FILE, has_tokenizer
from kvrelay.planning.quantity import size
from kvrelay.types.workers import POOLS, PoolName

if TYPE_CHECKING:
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.launch.endpoints import Endpoints
    from kvrelay.launch.local_cluster import LocalCluster
    from kvrelay.launch.model_download import ModelDownload

_POLL_S = 0.3
# That are kept.
_MOST_LOGS = 20
# While the cluster serves.
_WATCH_S = 1.0
# Columns of a terminal that nobody has made wider.
_WIDTH = 80
# More workers are counted by state instead.
_MOST_NAMED = 6
_ROOT = Path(__file__).parents[3]
KERNELS = (_ROOT / "kvrelay" / "engine" / "native" / "kernels", _ROOT / "kv_transfer" / "kernels")
_QUESTION = (
    '{"messages": [{"role": "user", "content": "What is 3 plus 4?"}],\n'
    '     "temperature": 0, "stream": true}'
)
_TOKENS = '{"prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": true}'
_DEMO_NOTE = "It is tiny: it tells stories, adds small numbers and calls a few functions."
# What a disk has to hold of a log.
_LOG_BYTES = 2**20
_CONTROLLER_GONE = (
    "the controller has ended, and the workers with it; they start again, and streams go on then"
)
_ROUTER_GONE = "the router has ended, and its streams with it; it starts again"
# In double quotes a shell takes these characters as they are, and drops a backslash with the end of
# its line.
_PROMPT = (
    "There was once a shy little girl named Kira, who lived in a tree house in the forest. "
    "She had a good friend, a mouse named Yara. One morning Kira was in the forest when "
    "she heard a cry. It was Yara. She was stuck in a thorn bush and could not get out. "
    "Kira pulled and pulled, but the thorns were strong. So she called her father. He came "
    "with a big pair of scissors. Kira thought for a moment."
)


def new_log_file() -> Path:
    """Creates an empty file for the log of one cluster, which remains when the cluster has ended.
    Removes the oldest logs of the user, so that `_MOST_LOGS` remain.

    The folder is XDG_STATE_HOME, or ~/.local/state, plus kvrelay/logs; that of temporary files if
    the folder cannot be written or its disk is full.
    """
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(root) / "kvrelay" / "logs"
    began = time.strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _file_with_room(f"serve-{began}-", folder)
    except OSError:
        path = _file_with_room(f"kvrelay-serve-{began}-", None)
    # Names of the same second are in no order.
    logs = sorted((one for one in folder.glob("serve-*.log") if one != path), key=_last_written)
    for old in logs[: 1 - _MOST_LOGS]:
        old.unlink(missing_ok=True)
    return path


def _last_written(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, file.name
    except FileNotFoundError:
        # Another start removed it.
        return 0.0, file.name


def _file_with_room(prefix: str, folder: Path | None) -> Path:
    """Creates an empty file. Raises OSError if its disk has no room for a log."""
    file, name = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=folder)
    try:
        os.posix_fallocate(file, 0, _LOG_BYTES)
        os.ftruncate(file, 0)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(file)
    return Path(name)


def removed_if_empty(log_file: Path) -> bool:
    """Removes the log of a cluster that never served, unless it tells why."""
    try:
        is_empty = not log_file.stat().st_size
    except FileNotFoundError:
        # Many clusters were started since.
        return True
    if is_empty:
        log_file.unlink(missing_ok=True)
    return is_empty


async def show_progress(cluster: LocalCluster, status: Status) -> None:
    """Shows the download of the model, then the state of each worker, until cancelled."""
    shown: dict[str, str] = {}
    compiles, began = True, time.monotonic()
    while True:
        shown |= await cluster.worker_states() or {}
        if shown or cluster.download is None or cluster.download.is_complete:
            # Reads and hashes the sources, and once they are compiled they stay so.
            compiles = compiles and await asyncio.to_thread(compiles_kernels)
            line = progress_line(shown, compiles)
        else:
            line = await asyncio.to_thread(download_line, cluster.download)
        status.update(f"{line}, {time.monotonic() - began:.0f} s")
        await asyncio.sleep(_POLL_S)


async def report_changes(cluster: LocalCluster, console: Console) -> None:
    """Prints a line when a worker has ended or begins to serve, and when the controller or the
    router has ended, until cancelled. The log has the reasons.
    """
    news, deaths, router_deaths = WorkerNews(await cluster.worker_states() or {}), 0, 0
    while True:
        await asyncio.sleep(_WATCH_S)
        states = await cluster.worker_states()
        lines = []
        if cluster.controller_deaths > deaths:
            deaths = cluster.controller_deaths
            lines.append(_CONTROLLER_GONE)
            news.forget_served()
        if cluster.router_deaths > router_deaths:
            router_deaths = cluster.router_deaths
            lines.append(_ROUTER_GONE)
        if states is not None:
            ended = {} if news.is_complete(states) else await cluster.ended_workers()
            lines += news.lines(states, ended)
        for line in lines:
            now = f"{time.strftime('%H:%M:%S')}  "
            told = wrapped(now + line, console.file, len(now))
            console.print(told, markup=False, highlight=False)


def compiles_kernels() -> bool:
    """Whether the workers of this machine still have to compile their kernels."""
    return not all(map(is_compiled, KERNELS))


def download_line(download: ModelDownload) -> str:
    """Returns one line for a download."""
    if not download.total_bytes:
        return f"looking for {download.model} on the Hugging Face hub"
    done, total = download.done_bytes, download.total_bytes
    rate = done / max(download.elapsed_s, 1e-3)
    left = f", {timedelta(seconds=int((total - done) / rate))} left" if rate else ""
    return f"downloading {download.model}: {size(done)} of {size(total)}, {size(int(rate))}/s{left}"


def progress_line(states: Mapping[str, str], compiles: bool = False) -> str:
    """Returns one line for the states of the workers, by worker. `compiles`: they compile their
    kernels.
    """
    if not states:
        return "starting Redis, Ray and workers"
    note = " (compiling kernels, once for this processor: about a minute)" if compiles else ""
    if len(states) <= _MOST_NAMED:
        each = [f"{worker} {state}" for worker, state in sorted(states.items())]
    else:
        each = [f"{count} {state}" for state, count in sorted(Counter(states.values()).items())]
    return f"starting workers: {', '.join(each)}{note}"


def ready_line(endpoints: Endpoints) -> str:
    """Returns the ready line for a person: it fits 80 columns, since the address of HTTP is without
    its scheme. The URL of the status page has that.
    """
    _, _, http = endpoints.http.partition("://")
    return str(replace(endpoints, http=http))


def print_next_steps(
    console: Console, config: ClusterConfig, endpoints: Endpoints, log_file: Path
) -> None:
    """Prints what a user can do with the cluster."""
    text = next_steps(config, endpoints, log_file, own_command())
    # Commands must be copied as they are, so nothing else breaks their lines.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def next_steps(
    config: ClusterConfig,
    endpoints: Endpoints,
    log_file: Path,
    command: Sequence[str] = ("kvrelay",),
) -> str:
    """Returns the text of `print_next_steps`. Commands are on lines of their own, so that they can
    be copied. `command`: the words that start kvrelay.
    """
    first = config.served[0]
    counts = _counts(first)
    prompt = "a prompt that takes both pools" if all(counts.values()) else "a prompt"
    secured = config.security.tokens_file is not None or config.security.tls is not None
    usual = ListenConfig()
    target = () if endpoints.grpc == usual.grpc else ("--target", endpoints.grpc)
    admin = () if endpoints.admin == usual.admin else ("--admin", endpoints.admin)
    model = ("--model", str(first.model.name)) if config.models else ()
    steps = [
        *(_served_by(one) for one in config.served),
        *([_DEMO_NOTE] if any(one.model.path == DEMO for one in config.served) else []),
        "",
        f"Status page   {_reachable(endpoints.http)}/",
        f"Log           {log_file}",
        "Stop          Ctrl-C; once more stops at once",
        "",
    ]
    if secured:
        steps.append("Clients need a token or certificates: see docs/guides/security.md")
    elif not has_tokenizer(first.model.path):
        steps += [
            f"{first.model.path} has no {TOKENIZER_FILE}: clients send token ids, and get them:",
            f"curl -sS {endpoints.http}/v1/completions \\",
            "    -H 'content-type: application/json' \\",
            f"    -d {shlex.quote(_with_model(_TOKENS, *model[1:]))}",
            "Pools and workers:",
            shlex.join([*command, "status", *admin]),
        ]
    else:
        steps += [
            f"In another terminal, {prompt}, with the time per phase:",
            shlex.join([*command, "generate", *target, *model, "--ledger"]) + " \\",
            *_quoted(_PROMPT),
            "The same cluster over HTTP:",
            f"curl -sSN {endpoints.http}/v1/chat/completions \\",
            "    -H 'content-type: application/json' \\",
            f"    -d {shlex.quote(_with_model(_QUESTION, *model[1:]))}",
            "Pools and workers:",
            shlex.join([*command, "status", *admin]),
        ]
    return "\n".join(steps)


def _quoted(text: str) -> list[str]:
    """Returns the lines of one word of a shell, which fit a terminal of 80 columns."""
    lines = textwrap.wrap(f'"{text}"', _WIDTH - len(" \\"), break_long_words=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def own_command() -> list[str]:
    """Returns the words that start this command in the user's shell: `kvrelay` if PATH finds the
    one that runs, else its path.
    """
    running = Path(sys.argv[0])
    found = shutil.which("kvrelay")
    if found is not None and running.name == "kvrelay" and Path(found).samefile(running):
        return ["kvrelay"]
    if running.name == "kvrelay":
        return [sys.argv[0]]
    return [sys.executable, "-m", "kvrelay"]


def _served_by(config: ClusterConfig) -> str:
    workers = " and ".join(
        f"{count} {pool} worker{'s' * (count != 1)}"
        for pool, count in _counts(config).items()
        if count
    )
    path, name = config.model.path, config.model.name
    return f"{path if name is None else f'{name} ({path})'} is served by {workers or 'no worker'}."


def _with_model(body: str, model: str = "") -> str:
    """Adds the model's name to a request's body, on a line of its own."""
    return f'{{"model": {json.dumps(model)},\n     {body[1:]}' if model else body


def _reachable(url: str) -> str:
    """Returns a URL that a browser on this machine can open. The address of all interfaces is in no
    certificate.
    """
    return url.replace("//0.0.0.0:", "//localhost:").replace("//[::]:", "//localhost:")


def _counts(config: ClusterConfig) -> dict[PoolName, int]:
    return {pool: config.pool(pool).replicas for pool in POOLS}
