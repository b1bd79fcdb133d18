"""The script that vLLM's Python runs, against a stand-in with vLLM's calls that prefills one prompt
in a step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench.engine_process import EngineProcess, vllm_command
from kvrelay.errors import Unavailable

STAND_IN = """
import json, os
from types import SimpleNamespace as Namespace

__version__ = "0.0"
written = open(os.environ["WRITTEN"], "w")

def write(**what):
    print(json.dumps(what), file=written, flush=True)

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class Engine:
    vllm_config = Namespace(scheduler_config=Namespace(max_num_batched_tokens=4096, async_scheduling=False))

    def __init__(self):
        self.waiting, self.running = {}, {}

    def add_request(self, name, prompt, params):
        assert params.options["ignore_eos"] and params.options["temperature"] == 0
        self.waiting[name] = (len(prompt["prompt_token_ids"]), params.options["max_tokens"])

    def step(self):
        if self.waiting:
            name = next(iter(self.waiting))
            self.running[name] = [0, self.waiting.pop(name)[1]]
        for one in self.running.values():
            one[0] += 1
        write(step=sorted(self.running))
        outputs = [Namespace(request_id=name, outputs=[Namespace(token_ids=[1] * n)]) for name, (n, _) in self.running.items()]
        self.running = {name: one for name, one in self.running.items() if one[0] < one[1]}
        return outputs

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def abort_request(self, names):
        for name in names:
            self.running.pop(name, None)

class LLM:
    def __init__(self, model, **options):
        write(model=model, **options, **{name: os.environ[name] for name in os.environ if name.startswith("VLLM_")})
        self.llm_engine = Engine()
"""  # noqa: E501


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WRITTEN", str(tmp_path / "written"))
    return tmp_path / "written"


def settings(**more: Any) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:1]
    one = {
        "model": "m",
        "dtype": "bfloat16",
        "device": "cpu",
        "cores": cores,
        "max_model_len": 64,
        "kv_bytes": 3 << 29,
    }
    return {**one, **more}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_vllm_is_told_where_and_how_to_run(written: Path) -> None:
    with EngineProcess(vllm_command(sys.executable), settings()) as engine:
        assert engine.facts == {"name": "vLLM 0.0", "chunk_tokens": 4096, "async_scheduling": False}
    told = lines(written)[0]
    assert told["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "2"  # whole GiB
    assert (told["model"], told["dtype"], told["max_model_len"]) == ("m", "bfloat16", 64)
    assert told["enable_prefix_caching"] is False
    assert "kv_cache_memory_bytes" not in told


def test_on_a_gpu_vllm_leaves_memory_to_others(written: Path) -> None:
    with EngineProcess(vllm_command(sys.executable), settings(device="cuda")):
        pass
    assert lines(written)[0]["kv_cache_memory_bytes"] == 3 << 29


def test_a_batch_is_timed_once_every_sequence_decodes(written: Path) -> None:
    with EngineProcess(vllm_command(sys.executable), settings()) as engine:
        assert engine.prefill([1, 2, 3]) > 0
        engine.open([[1, 2], [3], [4, 5, 6]])
        opened = len(lines(written))
        assert engine.decode(4) > 0
        engine.close()
        assert engine.prefill([7]) > 0
    steps = [line["step"] for line in lines(written)[opened:]]
    # Nothing of the batch is left at the end
    assert [len(step) for step in steps] == [3, 3, 3, 3, 1]


def test_a_sequence_that_ends_too_early_fails_the_measurement(written: Path) -> None:
    with EngineProcess(vllm_command(sys.executable), settings(max_model_len=8)) as engine:
        engine.open([[1, 2, 3, 4, 5, 6]])
        with pytest.raises(Unavailable, match="one token per sequence"):
            engine.decode(8)
