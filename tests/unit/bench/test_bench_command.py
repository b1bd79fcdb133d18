from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.tiny_models import build

from kvrelay.cli.main import run

Output = pytest.CaptureFixture[str]

# In place of a peer's Python: whatever script it is told to run, it is this engine.
FAKE_PYTHON = """#!{python}
import sys
sys.path.insert(0, {root!r})
from kvrelay.bench.engines.loop import serve

class Fake:
    def __init__(self, settings): pass
    def facts(self): return {{"name": "vLLM 0.0"}}
    def prefill(self, prompt): return 1000.0
    def open(self, prompts): pass
    def decode(self, steps): return 1000.0 * steps
    def close(self): pass

serve(Fake)
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    file = tmp_path / "python"
    file.write_text(FAKE_PYTHON.format(python=sys.executable, root=str(Path(__file__).parents[3])))
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "engine", "--help"]])
def test_help_has_an_example(capsys: Output, arguments: list[str]) -> None:
    assert run(arguments) == 0
    assert "Example: kvrelay bench engine" in capsys.readouterr().out


@pytest.mark.long
def test_json_beside_a_peer(
    tiny_model: Callable[..., Path], fake_python: Path, capsys: Output
) -> None:
    command = ["bench", "engine", "--quick", "--json", "--runs", "2", "--model", str(tiny_model())]
    assert run([*command, "--peer", f"vllm={fake_python}"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert [row["tokens"] for row in report["prefill"]] == [128]  # the model takes 192 tokens
    assert [(row["batch"], row["context"]) for row in report["decode"]] == [
        (1, 128),
        (4, 128),
        (16, 128),
    ]
    assert set(report["engines"]) == {"kvrelay", "vLLM 0.0"}
    for row in (*report["prefill"], *report["decode"]):
        assert row["engines"]["vLLM 0.0"]["seconds"] == 1000.0
        assert row["ratio"] == 1000.0 / row["engines"]["kvrelay"]["seconds"] > 1
    assert "prefill" in printed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runs", "0"], "--runs"),
        (["--threads", "100000"], "cores available"),
        (["--peer", "vllm"], "vllm=PYTHON"),
        (["--peer", "vllm=/no/such/python"], "no such program"),
        (["--peer", "other=/bin/sh"], "vllm=PYTHON"),
        (["--weights", "int3"], "int3"),
        (["--model", "no such folder"], "allowed are"),
        (["--model-shape", "no-such-shape"], "llama-3.1-8b"),
        (["--model-shape", "m200", "--peer", "vllm=/bin/sh"], "--peer vllm needs a checkpoint"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], says: str, capsys: Output) -> None:
    before = os.sched_getaffinity(0)
    assert run(["bench", "engine", *arguments]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert len(shown.strip().splitlines()) == 1
    assert os.sched_getaffinity(0) == before


def test_a_model_that_is_too_short_is_bad_usage(tmp_path: Path, capsys: Output) -> None:
    folder = build("llama", tmp_path, max_position_embeddings=64)
    assert run(["bench", "engine", "--quick", "--model", str(folder)]) == 2
    assert "choose a model with a longer context" in capsys.readouterr().err


def test_a_peer_that_fails_is_reported(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: Output
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 1\n")
    broken.chmod(0o755)
    command = [
        "bench",
        "engine",
        "--quick",
        "--model",
        str(tiny_model()),
        "--peer",
        f"vllm={broken}",
    ]
    assert run(command) == 1
    assert "no module named vllm" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_is_told(capsys: Output) -> None:
    assert run(["bench", "engine", "--device", "cuda"]) == 2
    assert "finds 0 CUDA devices" in capsys.readouterr().err
