"""Asks vLLM whether it can serve a model, in a process of its own: `kvrelay serve` does not import
vLLM.

`python -m kvrelay.vllm_engine.model_check` reads a cluster's configuration as JSON on stdin. Its
last line on stdout is JSON: why a pool's workers would refuse it, or null.
"""

from __future__ import annotations

import importlib
import json
import sys

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.model.loader import first_line
from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.types.workers import POOLS
from kvrelay.vllm_engine.engine_config import engine_config


def _import_nixl() -> None:
    """Raises ConfigError if NIXL is installed, and a library that it needs is not."""
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"transfer.transport: vllm-nixl: the package nixl cannot be imported: "
            f"{first_line(error)}; install what is missing, or set transfer.transport: auto"
        ) from error


def main() -> None:
    """Checks the configuration of each pool that has workers."""
    config = ClusterConfig.model_validate_json(sys.stdin.read())
    refusal = None
    try:
        folder = str(find_checkpoint(config.model.path).folder)
        if config.transfer.in_vllm:
            _import_nixl()
        for pool in POOLS:
            if config.pool(pool).replicas:
                engine_config(config, pool, folder)
    except KvRelayError as error:
        refusal = error.message
    print(json.dumps(refusal))


if __name__ == "__main__":
    main()
