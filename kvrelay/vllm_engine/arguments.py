"""The arguments of vLLM's engine that follow from the configuration. Does not import vLLM."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection
from typing import Any

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError
from kvrelay.types.workers import PoolName

# Read by vLLM when it is imported. Values in the environment win.
VARIABLES = {
    # The engine runs in the worker's process: the hand-off reads its blocks there, and nothing is
    # left behind when the process is killed.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The sampler is a logits processor of this runner.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Events name blocks by the whole hash, by which the blocks are found again.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_COLOR": "0",
}
# Those that nobody can override.
_FORCED = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
)
# Most prompts that a prefill worker runs at once.
_MAX_PROMPTS = 32
# Part of kv.memory that holds KV on its way between workers.
STAGING_SHARE = 4
NIXL_CONNECTOR = "NixlHandoffConnector"
# A prefill worker holds the blocks of a prompt that nobody reads as long as a lease lasts, and at
# least so many seconds. vLLM takes whole seconds.
_SHORTEST_HOLD_S = 2


def set_variables() -> None:
    """Sets VARIABLES in the environment. vLLM must not be imported yet."""
    for name, value in VARIABLES.items():
        if name in _FORCED:
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def hands_over(config: ClusterConfig, pool: PoolName) -> bool:
    """Whether the workers of this pool exchange KV with those of the other pool."""
    return pool == "prefill" or config.prefill.replicas > 0


def engine_arguments(config: ClusterConfig, pool: PoolName, model_path: str) -> dict[str, Any]:
    """Returns the keywords for vLLM's EngineArgs. engine_args of the pool come last."""
    section, kv = config.pool(pool), config.pool_kv(pool)
    assert kv.memory != "auto", "the configuration refuses it"
    slots = config.decode.max_batch if pool == "decode" else _MAX_PROMPTS
    # In a decode step, prompts get chunk_tokens in addition to the batch.
    budget = section.chunk_tokens + (slots if pool == "decode" else 0)
    return {
        "model": model_path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "block_size": kv.block_size,
        "kv_cache_memory_bytes": kv.memory - staging_bytes(config, pool),
        "enable_prefix_caching": kv.prefix_cache,
        "max_num_seqs": min(slots, budget),
        "max_num_batched_tokens": budget,
        "scheduling_policy": "priority",
        "skip_tokenizer_init": True,
        # Requests bring text alone.
        "language_model_only": True,
        "trust_remote_code": False,
        "disable_log_stats": True,
        "async_scheduling": False,
        "logits_processors": ["kvrelay.vllm_engine.sampler:KeyedSampler"],
        "kv_transfer_config": _connector(config, pool),
        # The worker reads the events in its own process.
        "kv_events_config": {"enable_kv_cache_events": kv.prefix_cache, "publisher": "null"},
        # Blocks of one kind can be handed over. Layers with a window then keep all tokens.
        "disable_hybrid_kv_cache_manager": True if hands_over(config, pool) else None,
        **section.engine_args,
    }


def _connector(config: ClusterConfig, pool: PoolName) -> dict[str, Any]:
    """vLLM's connector of the pool's transport. What cannot be loaded is computed."""
    recompute = {"kv_load_failure_policy": "recompute"}
    if not config.transfer.in_vllm:
        return {
            "kv_connector": "HandoffConnector",
            "kv_connector_module_path": "kvrelay.vllm_engine.connector",
            "kv_role": "kv_both",
            **recompute,
        }
    return {
        "kv_connector": NIXL_CONNECTOR,
        "kv_connector_module_path": "kvrelay.vllm_engine.nixl.connector",
        "kv_role": "kv_producer" if pool == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {
            "kv_lease_duration": max(_SHORTEST_HOLD_S, math.ceil(config.transfer.lease_s)),
            # UCX without a pool of threads: NIXL's own thread is enough for one reader.
            "num_threads": 0,
        },
        **recompute,
    }


def staging_bytes(config: ClusterConfig, pool: PoolName) -> int:
    """The part of kv.memory that holds KV on its way between workers. None of it does without a
    prefill pool, or if one worker's vLLM reads from that of another.
    """
    memory = config.pool_kv(pool).memory
    assert memory != "auto", "the configuration refuses it"
    staged = hands_over(config, pool) and not config.transfer.in_vllm
    return memory // STAGING_SHARE if staged else 0


def check_names(given: Collection[str], known: Collection[str], pool: PoolName) -> None:
    """Raises ConfigError for an argument that this release of vLLM does not have."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(
                f"{pool}.engine_args: {name:.60} is not an argument of vLLM's engine{hint}"
            )
