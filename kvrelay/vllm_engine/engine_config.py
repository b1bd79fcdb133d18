"""vLLM's own configuration of a pool's engine. Making it reads config.json and loads no weights, so
it tells early what vLLM refuses.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import first_line
from kvrelay.errors import ConfigError, ModelRefused
from kvrelay.models.model_json import read_config_json
from kvrelay.types.workers import PoolName
from kvrelay.vllm_engine.arguments import check_names, engine_arguments, hands_over, set_variables
from kvrelay.vllm_engine.version_check import check_version


def engine_config(config: ClusterConfig, pool: PoolName, model_path: str) -> Any:
    """Returns vLLM's VllmConfig for the workers of a pool. Imports vLLM.

    Raises ConfigError for arguments that vLLM does not have and for a block size that it changes or
    does not have, and ModelRefused for what vLLM refuses, and for a model that is not handed over
    although there are prefill workers.
    """
    check_version()
    set_variables()
    os.environ["OMP_NUM_THREADS"] = str(config.pool(pool).threads)
    from vllm.engine.arg_utils import EngineArgs

    check_names(config.pool(pool).engine_args, [one.name for one in fields(EngineArgs)], pool)
    _import_model(model_path)
    try:
        made = EngineArgs(**engine_arguments(config, pool, model_path)).create_engine_config()
    # vLLM raises many kinds of exceptions for arguments and models.
    except Exception as error:
        raise ModelRefused(
            f"{model_path}: vLLM refuses it: {reason(error)}; change what the reason names, in "
            "model or engine_args, or choose another model"
        ) from error
    if made.model_config.is_multimodal_model:
        text_only(made.model_config)
    if hands_over(config, pool):
        check_handoff(made, config.pool_kv(pool).block_size, model_path)
    if not made.model_config.is_hybrid and not made.model_config.is_attention_free:
        _check_kernel(made)
    return made


def text_only(model: Any) -> None:
    """Takes back what vLLM prepares for images: where there is a KV connector it expects their
    embeddings, and loads the image processor. It wants a tokenizer even so.
    """
    model.skip_tokenizer_init = False
    model.multimodal_config.enable_mm_embeds = False
    model.multimodal_config.allow_missing_mm_embeddings = False


def _import_model(model_path: str) -> None:
    """Imports the model's class. Raises ModelRefused if a package is missing that it needs, which
    vLLM would write to its log only, after seconds.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in read_config_json(Path(model_path)).get("architectures") or ():
        if (known := ModelRegistry.models.get(name)) is not None:
            try:
                known.load_model_cls()
            except ImportError as error:
                raise ModelRefused(
                    f"{model_path}: vLLM cannot import {name}: {first_line(error)}; install what "
                    "is missing, or choose another model"
                ) from error


def check_handoff(made: Any, block_size: int, model_path: str) -> None:
    """Raises ModelRefused for layers with a state, and ConfigError for another block size."""
    model = made.model_config
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        kind = "each layer keeps" if model.is_attention_free else "some of its layers keep"
        architecture = ", ".join(model.architectures)
        raise not_handed_over(
            model_path, f"{kind} a state instead of the KV of each token ({architecture})"
        )
    if made.cache_config.block_size != block_size:
        raise ConfigError(
            f"kv.block_size: {block_size}, and vLLM gives this model blocks of "
            f"{made.cache_config.block_size} tokens here; set kv.block_size to "
            f"{made.cache_config.block_size}"
        )


def _check_kernel(made: Any) -> None:
    """Raises ConfigError for a block size that vLLM's attention on CPUs does not have. vLLM itself
    finds that only after it has loaded the weights. On GPUs it chooses the attention by the size.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import get_attn_backend

    if not current_platform.is_cpu():
        return
    model, cache = made.model_config, made.cache_config
    with set_current_vllm_config(made):
        kernel = get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla
        )
    fitting = kernel.get_preferred_block_size(cache.block_size)
    if fitting != cache.block_size:
        raise ConfigError(
            f"kv.block_size: {cache.block_size}, and vLLM's attention on this CPU has blocks of "
            f"{fitting} tokens or a multiple; set kv.block_size to {fitting}"
        )


def not_handed_over(model_path: str, why: str) -> ModelRefused:
    """Returns the error for a model whose KV cannot be handed over. `why` is a clause."""
    return ModelRefused(
        f"{model_path}: its KV cannot be handed over with engine: vllm: {why}; set "
        "prefill.replicas to 0, and decode workers compute the prompts"
    )


def reason(error: Exception) -> str:
    """One line of vLLM's reason. Pydantic's first line says only how many errors there are, and its
    second or third one ends with the value, in brackets.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        said = " ".join(lines[1:3]).partition(" [type=")[0]
        return said.removeprefix("Value error, ")[:300].rstrip(". ")
    return first_line(error).rstrip(". ")
