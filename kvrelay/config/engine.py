"""The engine of a pool's workers, and the arguments that a pool passes to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, JsonValue

EngineName = Literal["native", "vllm"]

_HERE = "is set from"
_CODE = "runs code that the configuration names, which kvrelay does not allow; leave it out"
_ONE = "is not supported: a worker is one process with one engine; leave it out"
_HANDOFF = "is set by kvrelay's own hand-off; leave it out"
_SAMPLER = "is set by kvrelay, whose sampler draws the tokens; leave it out"

# Arguments of vLLM that a pool cannot set, with the reason and what to do instead.
RESERVED = {
    "model": f"{_HERE} model.path",
    "model_weights": f"{_HERE} model.path",
    "served_model_name": f"{_HERE} model.path",
    "tokenizer": f"{_HERE} model.path",
    "hf_config_path": f"{_HERE} model.path",
    "revision": f"{_HERE} model.path",
    "dtype": f"{_HERE} model.dtype",
    "max_model_len": f"{_HERE} model.max_model_len",
    "block_size": f"{_HERE} kv.block_size",
    "kv_cache_memory_bytes": f"{_HERE} kv.memory",
    "num_gpu_blocks_override": f"{_HERE} kv.memory",
    "enable_prefix_caching": f"{_HERE} kv.prefix_cache",
    "max_num_seqs": f"{_HERE} decode.max_batch",
    "max_num_batched_tokens": f"{_HERE} chunk_tokens of the pool",
    "scheduling_policy": "is always priority; leave it out",
    "runner": "is always generate; leave it out",
    "skip_tokenizer_init": "is always true, because the router tokenises; leave it out",
    "disable_log_stats": "is always true, because kvrelay reports the metrics; leave it out",
    "trust_remote_code": _CODE,
    "code_revision": _CODE,
    "worker_cls": _CODE,
    "worker_extension_cls": _CODE,
    "scheduler_cls": _CODE,
    "io_processor_plugin": _CODE,
    "reasoning_parser_plugin": _CODE,
    "model_class_overrides": _CODE,
    "logits_processors": _SAMPLER,
    "logprobs_mode": _SAMPLER,
    "async_scheduling": "is always false, because each token is sampled from (seed, position) and "
    "the tokens before it; leave it out",
    "speculative_config": "is not supported by kvrelay's sampler; leave it out",
    "spec_method": "is not supported by kvrelay's sampler; leave it out",
    "spec_model": "is not supported by kvrelay's sampler; leave it out",
    "spec_tokens": "is not supported by kvrelay's sampler; leave it out",
    "diffusion_config": "is not supported by kvrelay's sampler; leave it out",
    "watermark_config": "is not supported by kvrelay's sampler; leave it out",
    "kv_transfer_config": _HANDOFF,
    "kv_events_config": _HANDOFF,
    "ec_transfer_config": _HANDOFF,
    "tensor_parallel_size": _ONE,
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _ONE,
    "prefill_context_parallel_size": _ONE,
    "decode_context_parallel_size": _ONE,
    "distributed_executor_backend": _ONE,
    "hf_token": "is a secret, which does not belong in this file; set HF_TOKEN in the environment",
}


# Ends of names, within the values of arguments, that name code to import.
_CODE_NAMES = ("_cls", "_plugin", "_pass", "_passes")


def _check_values(value: JsonValue, path: str) -> None:
    """Raises ValueError for a value that names code: by its key, or a backend of compilation as
    MODULE.NAME.
    """
    if isinstance(value, list):
        for one in value:
            _check_values(one, path)
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        at = f"{path}.{name}"[:100]
        is_module = name == "backend" and isinstance(inner, str) and "." in inner
        if is_module or name.endswith(_CODE_NAMES) or RESERVED.get(name) == _CODE:
            raise ValueError(f"{at} {_CODE}")
        _check_values(inner, at)


def _free(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name, value in arguments.items():
        _check_values(value, name)
        if name in RESERVED:
            raise ValueError(f"{name} {RESERVED[name]}")
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(
                f"{name!r:.60} is not the name of an argument; write the names of vLLM's engine "
                "arguments with underscores, for example enforce_eager"
            )
    return arguments


# Checked against vLLM's own arguments when a worker starts, since this module does not import vLLM.
EngineArguments = Annotated[dict[str, JsonValue], AfterValidator(_free)]
