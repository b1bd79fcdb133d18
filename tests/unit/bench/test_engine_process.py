from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kvrelay.bench.engine_process import KVRELAY, EngineProcess, vllm_command
from kvrelay.bench.engines.kvrelay_engine import Kvrelay
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import Unavailable

# Speaks the protocol as an engine of another project does: prompts of length n take n seconds.
FAKE_PEER = """
from kvrelay.bench.engines.loop import serve

class Fake:
    def __init__(self, settings):
        print("a library greets on stdout")
        assert settings["model"] == "m"
    def facts(self):
        return {"name": "vLLM 0.0"}
    def prefill(self, prompt):
        if len(prompt) > 10_000:
            raise MemoryError("that is too long")
        return float(len(prompt))
    def open(self, prompts):
        self.batch = len(prompts)
    def decode(self, steps):
        return float(steps * self.batch)
    def close(self):
        del self.batch

serve(Fake)
"""


def settings(model: object, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "shape": None,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "cores": sorted(os.sched_getaffinity(0))[:1],
        "max_model_len": 192,
        "kv_bytes": 1 << 20,
        "chunk_tokens": 16,
        "load": {},
        **more,
    }


@pytest.fixture
def fake_peer(tmp_path: Path) -> Path:
    script = tmp_path / "fake.py"
    script.write_text(FAKE_PEER)
    return script


def test_a_conversation_with_an_engine(fake_peer: Path) -> None:
    with EngineProcess((sys.executable, str(fake_peer)), settings("m")) as engine:
        assert engine.name == "vLLM 0.0"
        assert engine.ready_seconds > 0
        assert engine.prefill([1, 2, 3]) == 3.0
        engine.open([[1], [2]])
        assert engine.decode(8) == 16.0
        engine.close()


def test_an_engine_that_fails_says_why(fake_peer: Path) -> None:
    with (
        EngineProcess((sys.executable, str(fake_peer)), settings("m")) as engine,
        pytest.raises(Unavailable, match="MemoryError: that is too long"),
    ):
        engine.prefill([0] * 10_001)


def test_an_engine_that_cannot_start_says_why(fake_peer: Path) -> None:
    with pytest.raises(Unavailable, match="the engine failed: OSError"):
        EngineProcess((sys.executable, str(fake_peer)), settings("m", cores=[]))


def test_a_process_that_dies_is_reported_with_its_last_line() -> None:
    command = (
        sys.executable,
        "-c",
        "import sys; sys.stdin.readline(); sys.exit('no such accelerator')",
    )
    with pytest.raises(Unavailable, match="ended without an answer: no such accelerator"):
        EngineProcess(command, settings("m"))


def test_a_process_that_never_listens_is_reported() -> None:
    with pytest.raises(Unavailable, match="it printed nothing"):
        EngineProcess((sys.executable, "-c", ""), settings("m"))


@pytest.mark.long
def test_our_engine_in_a_process_of_its_own(tiny_model: Callable[..., Path]) -> None:
    with EngineProcess(KVRELAY, settings(tiny_model())) as engine:
        assert engine.name == "kvrelay"
        assert engine.prefill(list(range(40))) > 0
        engine.open([[3, 4, 5], [6, 7, 8]])
        assert engine.decode(4) > 0
        engine.close()


def test_our_engine_computes_what_the_model_would_answer(tiny_model: Callable[..., Path]) -> None:
    """In chunks, in a batch, on blocks of its own: the tokens are those of transformers'
    generate.
    """
    import torch

    prompts = [[9, 4, 77, 23, 5, 31, 8, 90, 11, 54] * 4, [3, 4, 5, 6, 7] * 8]
    engine = Kvrelay(settings(tiny_model()))
    engine.open(prompts)
    engine.decode(5)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    for prompt, (tokens, _) in zip(prompts, engine._batch, strict=True):
        (expected,) = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        ).tolist()
        assert tokens == expected


def test_a_step_has_only_the_blocks_that_its_sequences_hold(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step costs more for each block, so spare blocks would be measured as work."""
    engine = Kvrelay(settings(tiny_model()))
    runner, run = engine._runner, engine._runner.run

    def checked(segments: Sequence[Segment]) -> object:
        for one in segments:
            tokens = one.start + len(one.token_ids)
            assert len(one.blocks) == -(-tokens // runner.layout.block_size)
        return run(segments)

    monkeypatch.setattr(runner, "run", checked)
    engine.prefill(list(range(40)))
    engine.open([[9, 4, 77] * 10, [3, 4, 5]])
    engine.decode(20)


def test_the_peer_is_given_the_libraries_that_come_with_it(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    openmp = tmp_path / "lib" / "libiomp5.so"
    for file in (python, openmp):
        file.parent.mkdir()
        file.touch()
    program, preload, interpreter, script = vllm_command(str(python))
    assert program == "/usr/bin/env"
    assert preload.startswith(f"LD_PRELOAD={openmp}")
    assert interpreter == str(python)
    assert Path(script).name == "vllm_engine.py"
    assert Path(script).stat().st_mode & stat.S_IFREG


def test_the_peers_script_finds_the_module_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    # It reads its settings, after its imports.
    with pytest.raises(Unavailable, match="the engine failed: KeyError"):
        EngineProcess(vllm_command(sys.executable), {})
