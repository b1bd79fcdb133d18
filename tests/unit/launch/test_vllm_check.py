"""vLLM is asked about a model before any worker starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ModelRefused, Unavailable
from kvrelay.launch.checks import vllm_check
from kvrelay.launch.checks.vllm_check import check_vllm

CONFIG = ClusterConfig.model_validate({"prefill": {"engine": "vllm"}, "decode": {"engine": "vllm"}})


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the process that imports vLLM by one that runs this code."""

    def replace(code: str) -> None:
        file = tmp_path / "check.py"
        file.write_text(f"import json, sys, time\ngiven = json.load(sys.stdin)\n{code}\n")
        monkeypatch.setattr(vllm_check, "check_version", lambda: "0.32.0")
        monkeypatch.setattr(
            vllm_check, "bound_to_parent", lambda *_: [sys.executable, "-S", str(file)]
        )

    return replace


def test_a_model_that_vllm_takes_passes(answering: Any) -> None:
    answering("print('a warning of vLLM'); print('null')")
    check_vllm(CONFIG)


def test_the_reason_is_the_error(answering: Any) -> None:
    answering("print(json.dumps(given['model']['path'] + ': vLLM refuses it: no kernel'))")
    with pytest.raises(ModelRefused, match=r"^/.*demo: vLLM refuses it: no kernel$"):
        check_vllm(CONFIG)


def test_a_process_that_fails_is_an_error_of_its_own(answering: Any) -> None:
    answering("sys.exit('libnuma is missing')")
    with pytest.raises(Unavailable, match=r"could not be asked.* 1: libnuma is missing; run"):
        check_vllm(CONFIG)


def test_on_a_machine_that_is_too_busy_the_workers_check(answering: Any) -> None:
    answering("time.sleep(600)")
    check_vllm(CONFIG, timeout_s=0.01)


def test_a_model_of_the_hub_is_checked_when_it_is_here(
    answering: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answering("print(json.dumps('refused'))")
    monkeypatch.setattr(vllm_check, "is_on_hub", lambda _: True)
    monkeypatch.setattr(vllm_check, "local_folder", lambda _: str(tmp_path))
    check_vllm(CONFIG)
    monkeypatch.setattr(vllm_check, "has_weights", lambda _: True)
    with pytest.raises(ModelRefused, match="refused"):
        check_vllm(CONFIG)
