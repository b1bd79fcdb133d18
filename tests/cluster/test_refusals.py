"""Set-ups of `kvrelay serve` that only a worker can judge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.timeout(600)
SECONDS = 300  # after which a command does not end by itself: as long as a start may take
SERVE = [sys.executable, "-m", "kvrelay.cli.main", "serve"]
FREE_PORTS = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")


def configuration(folder: Path, **sections: Any) -> str:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"listen": FREE_PORTS, **sections}))
    return str(path)


def test_a_worker_that_is_refused_ends_the_cluster_with_its_reason(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    # The configuration of gpt2 has keys of its own, so only the worker knows the size of its KV.
    config = configuration(tmp_path, kv={"memory": "1KiB"}, model={"path": str(tiny_model("gpt2"))})
    done = subprocess.run([*SERVE, "-c", config], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    check(
        done.stderr,
        "kv.memory: 1024 bytes do not hold one sequence",
        "set kv.memory to at least that",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3_next", "keeps a state that is not a KV cache"),
        ("bloom", "does not support attention backends"),
    ],
)
def test_a_model_that_would_run_wrong_ends_the_cluster_with_its_reason(
    architecture: str, reason: str, tiny_model: Callable[..., Path]
) -> None:
    command = [
        *SERVE,
        "--model",
        str(tiny_model(architecture)),
        "-c",
        configuration(tiny_model(architecture).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    check(done.stderr, reason)


def check(said: str, *words: str) -> None:
    told = [line for line in said.splitlines() if line.startswith("kvrelay: ")]
    assert len(told) == 1, said
    assert said.rstrip().endswith(told[0])
    assert "Traceback" not in said
    for word in words:
        assert word in told[0]


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("nemotron", marks=pytest.mark.long)])
def test_a_cluster_runs_where_nothing_can_be_cached(
    architecture: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """Neither compiled kernels nor anything of the hub's: home and caches are files, which even
    root cannot write in.

    The model's configuration has the length of its context under a name of its own, or its layers
    drop keywords.
    """
    (tmp_path / "file").touch()
    environment = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path / "file"))
    command = [*SERVE, "--model", str(tiny_model(architecture)), "-c", configuration(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        serve = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            assert serve.stdout is not None
            line = serve.stdout.readline()
            said = (tmp_path / "log").read_text()
            assert line.startswith("kvrelay ready "), said
            assert "set XDG_CACHE_HOME" in said
            serve.send_signal(signal.SIGTERM)
            assert serve.wait(SECONDS) == 0
            assert serve.stdout.read() == ""
        finally:
            if serve.poll() is None:
                os.killpg(serve.pid, signal.SIGKILL)
            serve.communicate()
