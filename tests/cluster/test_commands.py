"""The commands as users run them, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.client import Client, RetryPolicy
from kvrelay.errors import Unavailable
from kvrelay.process.child import family

pytestmark = pytest.mark.timeout(300)
KVRELAY = [sys.executable, "-m", "kvrelay.cli.main"]
LONG = {"prompt": [5] * 100, "max_tokens": 3900, "ignore_eos": True, "stream": True}
SMALL = ["--grpc-port", "0", "--http-port", "0", "--admin-port", "0"]


def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVRELAY, *arguments], capture_output=True, text=True, timeout=280)


def test_demo_proves_that_it_relayed() -> None:
    done = kvrelay("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("starting Redis")
    assert "disaggregated" in done.stdout
    assert done.stdout.count("│ yes │") == 4
    assert "NO" not in done.stdout.split("proof")[-1]


@pytest.mark.long
def test_verify_finds_every_path_identical() -> None:
    done = kvrelay("verify", "--requests", "10", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["identical"]
    assert [path["identical"] for path in report["paths"]] == [5, 10, 10, 10]
    assert re.match(
        r"[1-9]\d* requests? (was|were) on the killed worker", report["paths"][-1]["note"]
    )


def refuses(client: Client) -> bool:
    """Whether the router takes no new request any more."""
    try:
        client.generate(token_ids=[5], max_tokens=1).result()
    except Unavailable:
        return True
    return False


def test_serve_answers_and_a_second_signal_ends_all_at_once_and_leaves_nothing() -> None:
    """The first signal alone, which drains, is in test_refusals.py."""
    serve = subprocess.Popen(
        [*KVRELAY, "serve", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert serve.stdout is not None
        ready = re.fullmatch(
            r"kvrelay ready grpc=(\S+) http=(http://\S+) "
            r"admin=(\S+)\n",
            serve.stdout.readline(),
        )
        assert ready is not None
        grpc, http, admin = ready.groups()
        answer = json.loads(
            kvrelay(
                "generate", "Once upon a time", "--target", grpc, "--max-tokens", "5", "--json"
            ).stdout
        )
        assert len(answer["token_ids"]) <= 5
        assert answer["path"] in ("local", "disaggregated")
        status = json.loads(kvrelay("status", "--admin", admin, "--json").stdout)
        assert {pool["name"]: pool["desired"] for pool in status["pools"]} == {
            "prefill": 1,
            "decode": 1,
        }
        processes = family(serve.pid)
        assert len(processes) > 8, "Redis, a router, a controller, Ray and its workers"
        resident = sum(resident_kib(pid) for pid in processes)
        assert resident < 3 * 2**20, f"the idle cluster takes {resident / 2**20:.2f} GiB"
        words = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in processes)
        folders = {Path(name) for name in re.findall(r"/tmp/kvrelay-(?:\w+-)?\w+", words)}
        assert {folder.name.rpartition("-")[0] for folder in folders} == {
            "kvrelay-cluster",
            "kvrelay-ray",
            "kvrelay-redis",
        }
        with (
            Client(grpc, retry=RetryPolicy(max_attempts=1)) as client,
            httpx.stream("POST", f"{http}/v1/completions", json=LONG, timeout=60) as events,
        ):
            lines = events.iter_lines()
            next(lines)
            stream = iter(client.generate(token_ids=[5] * 100, max_tokens=3900, ignore_eos=True))
            next(stream)  # for the sake of which the first signal would wait
            serve.send_signal(signal.SIGTERM)
            # Two signals that come before one is handled count as one.
            while not refuses(client):
                pass
            serve.send_signal(signal.SIGTERM)
            with pytest.raises(Unavailable):
                list(stream)
            *_, last, end = filter(None, lines)
            assert "the router is shutting down" in last
            assert end == "data: [DONE]"
        assert serve.wait(timeout=60) == 0
    finally:
        if serve.poll() is None:
            os.killpg(serve.pid, signal.SIGKILL)
        serve.communicate()
    assert still_alive(processes) == []
    assert [folder for folder in folders if folder.exists()] == []


@pytest.mark.long
def test_an_odd_folder_a_dead_proxy_and_a_closed_terminal(tmp_path: Path) -> None:
    """Files of the user are no modules of kvrelay, loopback needs no proxy, and SIGHUP drains."""
    for name in ("types", "redis", "random", "queue", "token", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    # As the installed command: only the processes that it starts could look into the folder.
    alone = [sys.executable, "-P", "-m", "kvrelay.cli.main"]
    odd = {"http_proxy": "http://127.0.0.1:9", "grpc_proxy": "http://127.0.0.1:9"}
    environment = {**os.environ, **odd, "PYTHONOPTIMIZE": "2"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    serve = subprocess.Popen(
        [*alone, "serve", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )
    try:
        assert serve.stdout is not None
        ready = re.match(r"kvrelay ready grpc=(\S+)", serve.stdout.readline())
        assert ready is not None, serve.communicate(timeout=60)[1]
        generate = [*alone, "generate", "hi", "--max-tokens", "2", "--target", ready[1]]
        done = subprocess.run(generate, capture_output=True, timeout=120, **options)
        assert done.returncode == 0, done.stderr
        processes = family(serve.pid)
        serve.send_signal(signal.SIGHUP)
        assert serve.wait(timeout=120) == 0
    finally:
        if serve.poll() is None:
            os.killpg(serve.pid, signal.SIGKILL)
        serve.communicate()
    assert still_alive(processes) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("serve", "--model", "no/such/folder/anywhere"), "no/such/folder"),
        (("serve", "-c", "no-such-file.yaml"), "no-such-file.yaml"),
        (("serve", "--prefill", "-1"), "--prefill"),
        (("verify", "--requests", "0"), "--requests"),
    ],
)
def test_bad_usage_is_one_line_and_2(arguments: tuple[str, ...], word: str) -> None:
    done = kvrelay(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr


@pytest.mark.long
def test_a_model_that_would_run_wrong_is_refused_with_the_reason(
    tiny_model: Callable[..., Path],
) -> None:
    done = kvrelay("serve", "--model", str(tiny_model("qwen3_next")), *SMALL)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "keeps a state that is not a KV cache" in done.stderr


def resident_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def still_alive(pids: Iterable[int]) -> list[int]:
    """Those that are still alive after a while: the kernel kills what a process has started after
    the process, and a busy machine takes its time for that.
    """
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
