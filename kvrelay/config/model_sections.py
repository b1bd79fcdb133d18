"""The sections of the configuration that belong to one model: its pools, and how they are used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvrelay.config.adapters import AdaptersConfig, check_model_name
from kvrelay.config.pools import MAX_DRAFT_TOKENS, DecodeConfig, KvConfig, PrefillConfig
from kvrelay.config.section import BadValue, Count, FilePath, PositiveInt, Section
from kvrelay.types.workers import POOLS, PoolName

TransportName = Literal[
    "auto", "memory", "shm", "cuda_ipc", "grpc", "gloo", "nccl", "nixl", "vllm-nixl"
]
PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]
ToolFormatName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "json",
]


class ModelConfig(Section):
    """The served model."""

    # A folder, a hub id, or demo.
    path: FilePath = "demo"
    # The name that clients send; null: the name of the folder, or the hub id.
    name: Annotated[str, AfterValidator(check_model_name)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Tokens; capped at the maximum of the model.
    # The shortest request has one token of the prompt and one of the answer.
    max_model_len: Annotated[int, Field(ge=2, strict=True)] | None = None
    # How the model writes tool calls. auto: as its chat template tells.
    tool_format: ToolFormatName = "auto"


class TransferConfig(Section):
    """The hand-off of KV between the pools. `lease_s` is in seconds."""

    transport: TransportName = "auto"
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0

    @property
    def bypasses_tls(self) -> bool:
        """Whether KV travels on the transport's own connections, which support neither
        authentication nor encryption.
        """
        return self.transport in ("gloo", "nccl", "nixl", "vllm-nixl")

    @property
    def in_vllm(self) -> bool:
        """Whether one worker's vLLM reads the KV from the memory of another's."""
        return self.transport == "vllm-nixl"


class RouterConfig(Section):
    """Routing, queueing and retries in the router."""

    policy: PolicyName = "kv_aware"
    local_below_tokens: Count = 64
    max_queue: PositiveInt = 1024
    max_attempts: PositiveInt = 5
    default_deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    # Preempts running requests in favour of tenants below their share.
    preemption: bool = True
    # Processes that share the router's ports. Of the whole router, also with several models. Each
    # asks each other one for its figures, so their number is bounded.
    processes: Annotated[int, Field(ge=1, le=32)] = 1


class SloConfig(Section):
    """The service level objective of a request: its latencies, in milliseconds."""

    # Time to first token.
    ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2000.0
    # Time between two tokens.
    itl_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 100.0

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds."""
        return self.ttft_ms / 1000

    @property
    def itl_s(self) -> float:
        """Time between two tokens in seconds."""
        return self.itl_ms / 1000


# The first block and the last tokens of a sequence are never dropped, and eviction frees whole
# blocks of the others.
_BLOCKS_OF_BUDGET = 8


class ModelSections(Section):
    """The sections of one model."""

    model: ModelConfig = ModelConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    kv: KvConfig = KvConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    # null: the path follows from the prompt alone, and prompts may delay answers.
    slo: SloConfig | None = SloConfig()
    # The policy file, relative to this file.
    autoscaling: FilePath | None = None

    @model_validator(mode="after")
    def _chunks_hold_blocks(self) -> ModelSections:
        for pool in POOLS:
            chunk = self.pool(pool).chunk_tokens
            size = self.pool_kv(pool).block_size
            if chunk < size:
                raise BadValue(
                    f"{chunk} is below kv.block_size {size}; set it to {size} or more, or a "
                    "smaller kv.block_size",
                    (pool, "chunk_tokens"),
                )
        return self

    @model_validator(mode="after")
    def _ranks_can_run(self) -> ModelSections:
        for pool in POOLS:
            section = self.pool(pool)
            degree, gpus = section.tensor_parallel, section.resources.num_gpus
            if degree > 1 and gpus and (gpus < degree or gpus != int(gpus)):
                raise BadValue(
                    f"{gpus:g} GPUs are too few for {pool}.tensor_parallel {degree}, or not a "
                    f"whole number; set num_gpus to {degree} or more, or to 0 for the CPU",
                    (pool, "resources", "num_gpus"),
                )
            if degree > 1 and section.weights == "int8":
                raise BadValue(
                    f"int8 cannot be combined with {pool}.tensor_parallel {degree}, which does not "
                    f"run the native kernels; set weights: auto or tensor_parallel: 1",
                    (pool, "weights"),
                )
        return self

    @model_validator(mode="after")
    def _gpus_can_run(self) -> ModelSections:
        for pool in POOLS:
            section, dtype = self.pool(pool), self.pool_kv(pool).dtype
            attends_in_place = section.engine == "native" and section.tensor_parallel == 1
            if section.resources.num_gpus and attends_in_place and dtype != "auto":
                raise BadValue(
                    f"{dtype} KV cannot be read on a GPU by kvrelay's own engine; set kv.dtype: "
                    f"auto, or engine: vllm with engine_args: {{kv_cache_dtype: fp8}}",
                    (pool, "kv", "dtype"),
                )
        return self

    @model_validator(mode="after")
    def _draft_can_run(self) -> ModelSections:
        degree = self.decode.tensor_parallel
        if self.decode.draft is not None and degree > 1:
            raise BadValue(
                f"draft cannot be combined with decode.tensor_parallel {degree}, whose ranks share "
                "one model; set kind: ngram, or tensor_parallel: 1",
                ("decode", "speculation", "kind"),
            )
        return self

    @model_validator(mode="after")
    def _adapters_can_run(self) -> ModelSections:
        for pool in POOLS if self.adapters.serve else ():
            section = self.pool(pool)
            if section.tensor_parallel > 1:
                raise BadValue(
                    f"{section.tensor_parallel} ranks share the model, and adapters are not "
                    "divided among ranks; set tensor_parallel: 1, or serve no adapters",
                    (pool, "tensor_parallel"),
                )
            if section.resources.num_gpus:
                raise BadValue(
                    f"{section.resources.num_gpus:g} puts the model on a GPU, and adapters run on "
                    "CPUs; set num_gpus: 0, or serve no adapters",
                    (pool, "resources", "num_gpus"),
                )
        return self

    @model_validator(mode="after")
    def _tokens_can_be_evicted(self) -> ModelSections:
        eviction, decode = self.kv.eviction, self.decode
        if eviction is None:
            return self
        for key, is_bad, text in (
            (("engine",), decode.engine == "vllm", "vllm keeps the KV of all tokens"),
            (("tensor_parallel",), decode.tensor_parallel > 1, "ranks share the KV of a token"),
            (
                ("resources", "num_gpus"),
                bool(decode.resources.num_gpus),
                "tokens are dropped on CPUs only",
            ),
        ):
            if is_bad:
                raise BadValue(
                    f"cannot be combined with kv.eviction: {text}; leave eviction out",
                    ("decode", *key),
                )
        least = _BLOCKS_OF_BUDGET * self.pool_kv("decode").block_size
        if eviction.budget_tokens < least:
            raise BadValue(
                f"{eviction.budget_tokens} tokens are less than {_BLOCKS_OF_BUDGET} blocks of a "
                f"decode worker, which are {least} tokens; set {least} or more, or a smaller "
                "kv.block_size",
                ("kv", "eviction", "budget_tokens"),
            )
        return self

    @model_validator(mode="after")
    def _engines_fit(self) -> ModelSections:
        if self.prefill.engine != self.decode.engine:
            raise BadValue(
                f"{self.prefill.engine} cannot hand over to decode.engine {self.decode.engine}, "
                "whose KV blocks have another format; set one engine in both pools",
                ("prefill", "engine"),
            )
        for pool in POOLS:
            section = self.pool(pool)
            if section.engine == "native" and section.engine_args:
                raise BadValue(
                    f"has no meaning for {pool}.engine native; set {pool}.engine: vllm, or leave "
                    "it out",
                    (pool, "engine_args"),
                )
            if section.engine == "vllm":
                self._check_vllm(pool)
        if self.transfer.in_vllm:
            self._check_vllm_nixl()
        return self

    def _check_vllm_nixl(self) -> None:
        """Raises BadValue unless two pools of vLLM hand over."""
        at = ("transfer", "transport")
        if self.decode.engine != "vllm":
            raise BadValue(
                "vllm-nixl needs engine: vllm in both pools, and they have engine native; set "
                "transport: auto, or nixl for NIXL with engine native",
                at,
            )
        if not self.prefill.replicas:
            raise BadValue(
                "vllm-nixl needs a prefill pool, and prefill.replicas is 0; set it to 1 or more, "
                "or set transport: auto",
                at,
            )

    def _check_vllm(self, pool: PoolName) -> None:
        """Raises BadValue for values that only the native engine supports."""
        section, kv = self.pool(pool), self.pool_kv(pool)
        speculates = pool == "decode" and self.decode.speculation is not None
        for key, is_bad, allowed in (
            (("tensor_parallel",), section.tensor_parallel > 1, "1"),
            (("weights",), section.weights != "auto", "auto, with engine_args: {quantization: …}"),
            (("kv", "dtype"), kv.dtype != "auto", "auto, with engine_args: {kv_cache_dtype: …}"),
            (("speculation",), speculates, "null"),
            (("kv", "tiers"), bool(kv.tiers), "none"),
            (("kv", "memory"), kv.memory == "auto", "a size, such as 1GiB"),
            (("adapters",), bool(self.adapters.serve), "none"),
        ):
            if is_bad:
                at = ("adapters", "serve") if key == ("adapters",) else (pool, *key)
                raise BadValue(
                    f"is not supported with {pool}.engine vllm; allowed is {allowed}", at
                )
        if self.pool_kv("prefill").block_size != self.pool_kv("decode").block_size:
            raise BadValue(
                "differs between the pools, which engine vllm does not support; set one value in "
                "kv.block_size",
                (pool, "kv", "block_size"),
            )

    @property
    def keeps_latents(self) -> bool:
        """Whether workers keep the latent vectors of latent attention. Ranks share K and V by
        heads, so both pools keep K and V if one has ranks.
        """
        return all(self.pool(pool).tensor_parallel == 1 for pool in POOLS)

    @property
    def whole_windows(self) -> str:
        """Why workers keep all KV of layers with a sliding window; empty if they keep it only as
        long as it is needed. Both pools do the same, so that they can exchange blocks.
        """
        kinds = [self.pool_kv(pool) for pool in POOLS]
        if "vllm" in (self.prefill.engine, self.decode.engine):
            return "vLLM has memory of its own"
        if any(self.pool(pool).resources.num_gpus for pool in POOLS):
            return "a pool has GPUs"
        if not self.keeps_latents:
            return "ranks share the KV of a token (tensor_parallel)"
        if any(kv.tiers for kv in kinds):
            return "tiers hold whole blocks (kv.tiers)"
        if len({(kv.dtype, kv.block_size) for kv in kinds}) > 1:
            return "blocks are converted, since the pools differ in kv.dtype or kv.block_size"
        if self.transfer.transport == "nixl":
            return "nixl registers the memory (transfer.transport)"
        return ""

    def step_tokens(self, pool: PoolName) -> int:
        """The most new tokens of a sequence in a step of the pool, with drafts."""
        return max(self.pool(pool).chunk_tokens, MAX_DRAFT_TOKENS + 1)

    @property
    def bound_to_pools(self) -> tuple[str, str] | None:
        """Returns the key by which a worker of one pool cannot serve in the other pool, and the
        reason. Returns None if a worker can serve in both.

        A worker allocates its KV memory again for each role, so `kv` may differ.
        """
        if self.decode.engine == "vllm":
            return "engine", "is vllm, whose workers load their weights with each role"
        for key in ("resources", "tensor_parallel", "threads", "weights"):
            if getattr(self.prefill, key) != getattr(self.decode, key):
                return key, "differs between the pools"
        if self.prefill.tensor_parallel > 1:
            return "tensor_parallel", "is not 1, and ranks load their weights with each role"
        return None

    def workers_on_host(self, cores: int) -> int:
        """Returns how many workers of both pools a host with `cores` cores may have, at the start:
        Ray reserves cores for each.
        """
        number = sum(self.pool(pool).replicas for pool in POOLS)
        reserved = min(self.pool(pool).resources.num_cpus for pool in POOLS)
        return max(1, min(number, int(cores / reserved)) if reserved else number)

    def pool(self, name: PoolName) -> PrefillConfig | DecodeConfig:
        """Returns the section of a pool."""
        return self.prefill if name == "prefill" else self.decode

    def pool_kv(self, pool: PoolName) -> KvConfig:
        """Returns `kv` with the overrides of the pool."""
        overrides = self.pool(pool).kv
        given = {name: getattr(overrides, name) for name in type(overrides).model_fields}
        return self.kv.model_copy(
            update={name: value for name, value in given.items() if value is not None}
        )
