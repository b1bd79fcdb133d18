"""Checks that vLLM can serve a model, before any worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ModelRefused, Unavailable
from kvrelay.models import is_on_hub, local_folder, resolve_model
from kvrelay.models.model_files import has_weights
from kvrelay.process.child import bound_to_parent
from kvrelay.process.telemetry import get_logger
from kvrelay.vllm_engine.version_check import check_version

_MODULE = "kvrelay.vllm_engine.model_check"
# vLLM takes seconds to import. On a machine that is too busy for this, the workers check.
_TIMEOUT_S = 120.0

log = get_logger("launch")


def check_vllm(config: ClusterConfig, timeout_s: float = _TIMEOUT_S) -> None:
    """Asks vLLM about the model and engine_args, which takes as long as importing it. The workers
    check what follows from the weights.

    Raises ConfigError for another release of vLLM, ModelRefused with vLLM's reason, and Unavailable
    if vLLM cannot be asked.
    """
    check_version()
    model = resolve_model(config.model.path)
    if is_on_hub(model) and not has_weights(Path(local_folder(model))):
        # Asked again when it is downloaded.
        return
    try:
        done = subprocess.run(
            bound_to_parent(sys.executable, "-m", _MODULE),
            input=config.model_copy(update=config.with_paths([model])).model_dump_json(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.warning("vllm_check_skipped", model=model, timeout_s=timeout_s)
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(
            f"{model}: vLLM could not be asked about it: the process ended with "
            f"{done.returncode}: {last:.300}; run `python -m vllm.collect_env` to check the "
            "installation"
        )
    if (refusal := json.loads(done.stdout.splitlines()[-1])) is not None:
        raise ModelRefused(str(refusal))
