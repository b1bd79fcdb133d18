"""transformers' continuous batching as a peer, on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.bench.engine_process import EngineProcess
from kvrelay.bench.engines.generate_batch_engine import GenerateBatch
from kvrelay.bench.peers import GENERATE_BATCH, peer_command
from kvrelay.errors import InvalidArgument, Unavailable


def settings(**more: Any) -> dict[str, Any]:
    return {
        "model": None,
        "shape": None,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "cores": sorted(os.sched_getaffinity(0))[:1],
        "max_model_len": 192,
        "most_batch": 4,
        "kv_tokens": 1024,
        "chunk_tokens": 16,
        **more,
    }


@pytest.mark.filterwarnings("ignore")  # its own, at other versions others
def test_it_generates_what_the_model_would(tiny_model: Callable[..., Path]) -> None:
    engine = GenerateBatch(settings(model=str(tiny_model())))
    assert engine.prefill(list(range(40))) > 0
    prompts = [[9, 4, 77, 23, 5, 31, 8, 90, 11, 54] * 4, [3, 4, 5, 6, 7]]
    engine.open(prompts)
    assert engine.decode(3) > 0
    assert engine.decode(2) > 0
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    for prompt, tokens in zip(prompts, engine._batch, strict=True):
        (expected,) = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        ).tolist()
        assert tokens == expected
    engine.close()
    assert engine._batch == []


@pytest.mark.long
def test_in_a_process_of_its_own_with_random_weights(tiny_model: Callable[..., Path]) -> None:
    with EngineProcess(GENERATE_BATCH, settings(shape=str(tiny_model()))) as engine:
        assert engine.name.endswith("generate_batch")
        assert engine.facts["chunk_tokens"] == 16
        assert engine.prefill([1, 2, 3]) > 0
        engine.open([[1, 2], [3], [4, 5, 6]])
        assert engine.decode(2) > 0
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.long
def test_without_a_gpu_it_says_so(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(Unavailable, match="finds 0 CUDA devices"):
        EngineProcess(GENERATE_BATCH, settings(shape=str(tiny_model()), device="cuda"))


def test_peers() -> None:
    assert peer_command("generate_batch", has_checkpoint=False) == GENERATE_BATCH
    assert peer_command("vllm=/bin/sh", has_checkpoint=True)[-2] == os.path.abspath("/bin/sh")
    with pytest.raises(InvalidArgument, match="--peer vllm needs a checkpoint"):
        peer_command("vllm=/bin/sh", has_checkpoint=False)
    with pytest.raises(InvalidArgument, match="allowed are generate_batch, and vllm=PYTHON"):
        peer_command("tgi", has_checkpoint=True)
