"""What a worker does that is told to have a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError
from kvrelay.types.workers import PoolName
from kvrelay.worker.runtime.model_loading import load_runner
from kvrelay.worker.runtime.settings import WorkerSettings


class Asked(Exception):
    """Carries what the runner was loaded with."""


def settings(folder: Path, pool: PoolName, num_gpus: float) -> WorkerSettings:
    config = ClusterConfig.model_validate({pool: {"resources": {"num_gpus": num_gpus}}})
    return WorkerSettings("w", pool, str(folder), "redis://127.0.0.1:6379/0", config)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (0.5, "cuda"), (1, "cuda")])
async def test_the_model_is_loaded_where_the_pool_runs(
    pool: PoolName, num_gpus: float, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str, **options: Any) -> ModelRunner:
        raise Asked(options["device"])

    monkeypatch.setattr(ModelRunner, "load", load)
    with pytest.raises(Asked, match=f"^{device}$"):
        await load_runner(settings(tmp_path, pool, num_gpus))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_without_a_gpu_it_is_told(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"finds 0 CUDA devices; .*num_gpus: 0"):
        await load_runner(settings(tiny_model(), "decode", 1))
