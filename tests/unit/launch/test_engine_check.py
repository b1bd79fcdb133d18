"""An engine is asked about a model before any worker starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import FalconConfig, FalconForCausalLM

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, ModelRefused, Unavailable
from kvrelay.launch.checks import engine_check
from kvrelay.launch.checks.engine_check import check_engine

CONFIG = ClusterConfig.model_validate({"prefill": {"engine": "vllm"}, "decode": {"engine": "vllm"}})


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the process that imports vLLM by one that runs this code."""

    def replace(code: str) -> None:
        file = tmp_path / "check.py"
        file.write_text(f"import json, sys, time\ngiven = json.load(sys.stdin)\n{code}\n")
        monkeypatch.setattr(engine_check, "check_version", lambda: "0.32.0")
        monkeypatch.setattr(
            engine_check, "bound_to_parent", lambda *_: [sys.executable, "-S", str(file)]
        )

    return replace


def test_a_model_that_vllm_takes_passes(answering: Any) -> None:
    answering("print('a warning of vLLM'); print('null')")
    check_engine(CONFIG)


def test_the_reason_is_the_error(answering: Any) -> None:
    answering("print(json.dumps(given['model']['path'] + ': vLLM refuses it: no kernel'))")
    with pytest.raises(ModelRefused, match=r"^/.*demo: vLLM refuses it: no kernel$"):
        check_engine(CONFIG)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_on_gpus_the_own_engine_needs_flashinfer(
    pool: str, answering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering("print('null')")
    on_gpus: dict[str, Any] = {"resources": {"num_gpus": 2}}
    monkeypatch.setattr(engine_check, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"^{pool}.resources.num_gpus: 2, and .* set engine: vllm in both pools"
    ):
        check_engine(ClusterConfig.model_validate({pool: on_gpus}))
    # Not with ranks, nor with vLLM, nor where it is installed.
    check_engine(ClusterConfig.model_validate({pool: {**on_gpus, "tensor_parallel": 2}}))
    vllm = {name: {"engine": "vllm"} for name in ("prefill", "decode")}
    check_engine(ClusterConfig.model_validate({**vllm, pool: {**on_gpus, "engine": "vllm"}}))
    monkeypatch.setattr(engine_check, "find_spec", lambda name: name)
    check_engine(ClusterConfig.model_validate({pool: on_gpus}))


def test_a_process_that_fails_is_an_error_of_its_own(answering: Any) -> None:
    answering("sys.exit('libnuma is missing')")
    with pytest.raises(Unavailable, match=r"could not be asked.* 1: libnuma is missing; run"):
        check_engine(CONFIG)


def test_on_a_machine_that_is_too_busy_the_workers_check(answering: Any) -> None:
    answering("time.sleep(600)")
    check_engine(CONFIG, timeout_s=0.01)


def test_a_model_of_the_hub_is_checked_when_it_is_here(
    answering: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering("print(json.dumps('refused'))")
    monkeypatch.setattr(engine_check, "is_on_hub", lambda _: True)
    monkeypatch.setattr(engine_check, "local_folder", lambda _: str(tmp_path))
    check_engine(CONFIG)
    monkeypatch.setattr(engine_check, "has_weights", lambda _: True)
    with pytest.raises(ModelRefused, match="refused"):
        check_engine(CONFIG)


@pytest.mark.long
def test_a_thorough_check_knows_classes_that_no_worker_serves(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    model = FalconConfig(**sizes, num_attention_heads=2, alibi=False)
    FalconForCausalLM(model).save_pretrained(tmp_path)
    config = ClusterConfig.model_validate({"model": {"path": str(tmp_path)}})
    check_engine(config)
    with pytest.raises(ModelRefused, match="FalconForCausalLM does not support attention backends"):
        check_engine(config, thorough=True)
    check_engine(ClusterConfig(), thorough=True)


@pytest.mark.parametrize("ranks", [1, 2, 4, 3])
@pytest.mark.sweep(4)
def test_a_model_that_ranks_cannot_share_is_refused(ranks: int) -> None:
    """The demo model has 4 attention heads and 2 KV heads."""
    config = ClusterConfig.model_validate({"prefill": {"tensor_parallel": ranks}})
    if ranks < 3:
        check_engine(config)
        return
    with pytest.raises(ModelRefused, match=rf"tensor_parallel {ranks} does not divide .* 1, 2$"):
        check_engine(config)
