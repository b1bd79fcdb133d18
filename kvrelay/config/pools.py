"""The two pools: their workers, KV caches and resources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from kvrelay.config.engine import EngineArguments, EngineName
from kvrelay.config.section import (
    MAX_POOL,
    BadValue,
    FilePath,
    KvMemory,
    Memory,
    PositiveInt,
    Section,
)
from kvrelay.config.tiers import TierConfig, check_tiers
from kvrelay.types.token_eviction import EvictionMethod

_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
_MAX_CORES = 4096
_MAX_GPUS = 64
_MAX_CUSTOM = 10**9
# Ray's unit of resources: https://docs.ray.io/en/latest/ray-core/scheduling/resources.html
_LEAST = 0.0001


def _in_rays_units(amount: float) -> float:
    if 0 < amount < _LEAST:
        raise ValueError(
            f"{amount:g} is less than {_LEAST:g}, the least amount that Ray can reserve; set "
            f"{_LEAST:g} or more, or 0 to reserve nothing"
        )
    return amount


# auto: the dtype of the model.
KvDtype = Literal["auto", "int8", "int4"]
# Tokens per block.
BlockSize = Annotated[int, Field(ge=1, le=1024, strict=True)]
# Number of processes that share one worker's model.
TensorParallel = Annotated[int, Field(ge=1, le=64, strict=True)]
# auto: the checkpoint's dtype. int8: linear layers with 8-bit weights and activations.
Weights = Literal["auto", "int8"]


class EvictionConfig(Section):
    """Drops tokens of long sequences from their KV, on the decode workers."""

    # Keeps, for window, the last tokens; for attention, what the last tokens attended to; for
    # triattention, what the model's usual queries will attend to.
    method: EvictionMethod = "triattention"
    # Tokens of one sequence that have KV when it drops some. A prompt is computed whole before.
    budget_tokens: Annotated[int, Field(ge=128, le=2**24, strict=True)]


class KvConfig(Section):
    """The KV cache of the workers of both pools, unless a pool overrides it."""

    dtype: KvDtype = "auto"
    # Tokens; the CPU kernels read this many at once.
    block_size: BlockSize = 32
    # Bytes per worker.
    memory: KvMemory = 2**30
    digest: bool = True
    prefix_cache: bool = True
    # Where evicted blocks go, nearest first.
    tiers: tuple[TierConfig, ...] = ()
    # What long sequences do with their KV; None keeps all of it.
    eviction: EvictionConfig | None = None

    @model_validator(mode="after")
    def _tiers_fit(self) -> KvConfig:
        check_tiers(self.tiers)
        if self.tiers and not self.prefix_cache:
            raise BadValue(
                "tiers keep blocks of the prefix cache, which is off; set prefix_cache: true, or "
                "leave tiers out",
                ("tiers",),
            )
        return self


class PoolKvConfig(Section):
    """Overrides of `kv` for one pool. The hand-off converts between the formats."""

    dtype: KvDtype | None = None
    block_size: BlockSize | None = None
    memory: KvMemory | None = None
    tiers: tuple[TierConfig, ...] | None = None

    @model_validator(mode="after")
    def _tiers_fit(self) -> PoolKvConfig:
        check_tiers(self.tiers or ())
        return self


class Resources(Section):
    """Resources that Ray reserves for one worker."""

    num_cpus: Annotated[
        float, Field(ge=0, le=_MAX_CORES, allow_inf_nan=False), AfterValidator(_in_rays_units)
    ] = 1
    num_gpus: Annotated[
        float, Field(ge=0, le=_MAX_GPUS, allow_inf_nan=False), AfterValidator(_in_rays_units)
    ] = 0
    # Custom resources bind a pool to the nodes that offer them.
    custom: dict[str, Annotated[float, Field(ge=_LEAST, le=_MAX_CUSTOM, allow_inf_nan=False)]] = (
        Field(default={})
    )

    @field_validator("num_gpus")
    @classmethod
    def _whole_gpus(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError(
                f"{value:g} is above 1 and not a whole number, which Ray does not accept; set a "
                "whole number, or a share of one GPU such as 0.5"
            )
        return value

    @field_validator("custom")
    @classmethod
    def _not_rays_own(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not name or name in _RAYS_OWN:
                raise ValueError(
                    f"{name!r} is not the name of a custom resource; set CPUs with num_cpus, GPUs "
                    "with num_gpus, and leave memory out"
                )
            if not name.isascii():
                raise ValueError(
                    f"{name!r} is not ASCII, which Ray requires of the name of a custom resource; "
                    "use ASCII characters"
                )
        return value


class PrefillConfig(Section):
    """The prefill pool."""

    replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    engine: EngineName = "native"
    # Arguments of vLLM's engine.
    engine_args: EngineArguments = Field(default={})
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    # Threads of each process of a worker.
    threads: PositiveInt = 1
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    # Prompt tokens per step.
    chunk_tokens: PositiveInt = 512


# Draft tokens of a step.
MAX_DRAFT_TOKENS = 64


class SpeculationConfig(Section):
    """Drafts the next tokens of a sequence, and verifies several tokens in one step. Answers stay
    the same.
    """

    # ngram: tokens that followed the same n tokens earlier in the sequence. suffix: tokens that
    # followed the longest match in this or an earlier sequence. draft: tokens of a smaller model.
    kind: Literal["ngram", "suffix", "draft"] = "ngram"
    # Most draft tokens for one sequence in one step.
    tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS, strict=True)] = 4
    # Sequences. In a larger batch, reading the weights no longer bounds a step, so speculation is
    # off.
    max_batch: PositiveInt = 8
    # ngram, suffix: least number of tokens that must match.
    min_ngram: PositiveInt = 2
    # ngram: most tokens that are compared; the longest match wins.
    max_ngram: PositiveInt = 4
    # draft: folder, hub id or demo, as in model.path.
    model: FilePath | None = None
    # draft: bytes for the draft model's KV, in each decode worker.
    memory: Memory = 256 * 2**20

    @model_validator(mode="after")
    def _fit(self) -> SpeculationConfig:
        if self.kind != "suffix" and self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; set min_ngram to "
                "max_ngram or less"
            )
        if self.kind == "draft" and self.model is None:
            raise ValueError("kind draft needs a model; set model to the draft model's folder")
        if self.kind != "draft" and self.model is not None:
            raise BadValue(
                f"has no meaning for kind {self.kind}; set kind: draft, or leave it out", ("model",)
            )
        return self


class DecodeConfig(Section):
    """The decode pool."""

    replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    engine: EngineName = "native"
    # Arguments of vLLM's engine.
    engine_args: EngineArguments = Field(default={})
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    # Threads of each process of a worker.
    threads: PositiveInt = 1
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    # Batch slots of one worker: sequences that are decoding, prefilling or reserved.
    max_batch: PositiveInt = 32
    # Prompt tokens that one step prefills in addition to the decode batch.
    chunk_tokens: PositiveInt = 256
    speculation: SpeculationConfig | None = None

    @property
    def draft(self) -> SpeculationConfig | None:
        """Speculation with a draft model; None without one."""
        wanted = self.speculation
        return wanted if wanted is not None and wanted.kind == "draft" else None
