"""Models that cannot be served with vLLM, or not handed over: `kvrelay serve` ends with one
sentence that has vLLM's reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.vllm_models import MAX_LEN, Build

pytestmark = pytest.mark.timeout(600)
WAIT_S = 300.0
SERVE = [sys.executable, "-m", "kvrelay.cli.main", "serve"]
ANY_PORT = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")
ENGINE = {"engine": "vllm", "engine_args": {"enforce_eager": True}}
NO_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision is installed"
)
STATE = "its KV cannot be handed over with engine: vllm: "


@pytest.mark.parametrize(
    ("family", "block_size", "reason"),
    [
        ("granitemoehybrid", 32, f"{STATE}some of its layers keep a state"),
        ("gptq", 32, "vLLM refuses it: torch.float32 is not supported"),
        ("deepseek_v3", 32, "set kv.block_size to 16"),
        ("llama", 16, "set kv.block_size to 32"),
        ("llama", 80, "set kv.block_size to 32"),
        pytest.param("llava", 32, "No module named 'torchvision'; install", marks=NO_TORCHVISION),
    ],
)
def test_what_vllm_refuses_is_refused_before_a_worker_starts(
    family: str, block_size: int, reason: str, built: Build, tmp_path: Path
) -> None:
    assert reason in refusal(built(family), tmp_path, kv={"block_size": block_size})
    assert "worker_process_started" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("family", "sections", "reason"),
    [
        ("mistral", {}, f"{STATE}its layers have KV blocks of the kinds SlidingWindowSpec, "),
        (
            "granitemoehybrid",
            {"prefill": {"replicas": 0}, "kv": {"prefix_cache": True}},
            "vLLM cannot run its first step on this machine: IndexError",
        ),
    ],
)
def test_what_only_the_loaded_model_shows_is_refused_by_its_worker(
    family: str, sections: dict[str, Any], reason: str, built: Build, tmp_path: Path
) -> None:
    assert reason in refusal(built(family), tmp_path, **sections)
    started = (tmp_path / "log").read_text().count("worker_process_started")
    assert 1 <= started <= 2, "each worker at most once"


def refusal(model: Path, folder: Path, **sections: dict[str, Any]) -> str:
    """What `kvrelay serve` says when it refuses the model. Its log is the file `log`."""
    given = {
        "listen": ANY_PORT,
        "model": {"path": str(model), "dtype": "float32", "max_model_len": MAX_LEN},
        "kv": {"memory": "64MiB", **sections.get("kv", {})},
        "prefill": {**ENGINE, **sections.get("prefill", {})},
        "decode": ENGINE,
    }
    (folder / "cluster.yaml").write_text(json.dumps(given))
    done = subprocess.run(
        [*SERVE, "-c", str(folder / "cluster.yaml")],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    (folder / "log").write_text(done.stderr)
    assert (done.returncode, done.stdout) == (2, "")
    told = [line for line in done.stderr.splitlines() if line.startswith("kvrelay: ")]
    assert len(told) == 1, done.stderr
    assert done.stderr.rstrip().endswith(told[0])
    assert "Traceback" not in done.stderr
    return told[0]
