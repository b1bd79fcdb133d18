"""Checks that an engine can serve a model, before any worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, ModelRefused, Unavailable
from kvrelay.models import is_on_hub, local_folder, resolve_model
from kvrelay.models.model_files import has_weights
from kvrelay.process.child import bound_to_parent
from kvrelay.process.telemetry import get_logger
from kvrelay.types.workers import POOLS
from kvrelay.vllm_engine.version_check import check_version

# What can be asked about a model, each in a process of its own.
_VLLM, _NATIVE = "kvrelay.vllm_engine.model_check", "kvrelay.worker.runtime.model_check"
# An engine takes seconds to import. On a machine that is too busy for this, the workers check.
_TIMEOUT_S = 120.0

log = get_logger("launch")


def check_engine(
    config: ClusterConfig, timeout_s: float = _TIMEOUT_S, *, thorough: bool = False
) -> None:
    """Asks vLLM about the model and engine_args, or transformers about the model, if ranks share it
    or if the check is `thorough`. This takes as long as importing them. The workers check what
    follows from the weights.

    Raises ConfigError for another release of vLLM and for GPUs without flashinfer, ModelRefused
    with the engine's reason, and Unavailable if the engine cannot be asked.
    """
    _check_gpus(config)
    if config.decode.engine == "vllm":
        check_version()
        _ask(config, _VLLM, "vLLM", "`python -m vllm.collect_env`", timeout_s)
    elif thorough or any(config.pool(pool).tensor_parallel > 1 for pool in POOLS):
        _ask(config, _NATIVE, "transformers", "`transformers env`", timeout_s)


def _check_gpus(config: ClusterConfig) -> None:
    """Raises ConfigError if a pool needs flashinfer and it is not installed."""
    for pool in POOLS:
        section = config.pool(pool)
        own = section.engine == "native" and section.tensor_parallel == 1
        if own and section.resources.num_gpus and find_spec("flashinfer") is None:
            raise ConfigError(
                f"{pool}.resources.num_gpus: {section.resources.num_gpus:g}, and kvrelay's own "
                "engine needs flashinfer on a GPU, which is not installed; set engine: vllm in "
                "both pools, or run pip install '.[cuda]'"
            )


def _ask(config: ClusterConfig, module: str, engine: str, diagnosis: str, timeout_s: float) -> None:
    model = resolve_model(config.model.path)
    if is_on_hub(model) and not has_weights(Path(local_folder(model))):
        # Asked again when it is downloaded.
        return
    try:
        done = subprocess.run(
            bound_to_parent(sys.executable, "-m", module),
            input=config.model_copy(update=config.with_paths([model])).model_dump_json(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.warning("engine_check_skipped", model=model, engine=engine, timeout_s=timeout_s)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(
            f"{model}: {engine} could not be asked about it: the process ended with "
            f"{done.returncode}: {last:.300}; run {diagnosis} to check the installation"
        )
    if (refusal := json.loads(done.stdout.splitlines()[-1])) is not None:
        raise ModelRefused(str(refusal))
