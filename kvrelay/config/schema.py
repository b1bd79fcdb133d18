"""The schema of a cluster's configuration: one YAML file, frozen once loaded."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from kvrelay.config.redis_url import Sentinels
from kvrelay.config.size import parse_size
from kvrelay.types import POOLS, PoolName

_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})$")
_REDIS_URL = re.compile(r"^(embedded|rediss?(\+sentinel)?://.+|unix:///.+)$")
_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
MAX_POOL = 1024
"""Most workers of one pool."""
_MAX_CORES = 4096
_MAX_GPUS = 64
_MAX_CUSTOM = 10**9

TransportName = Literal["auto", "memory", "shm", "cuda_ipc", "grpc", "gloo", "nccl", "nixl"]
PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]
MetricName = Literal[
    "queue_depth", "queue_tokens", "queue_wait_p95_ms", "kv_occupancy", "ttft_p95_ms", "itl_p95_ms"
]
# Listeners of a router, by their keys in `listen`.
ENDPOINTS = ("grpc", "http", "admin")
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
# A file of the user's. The empty path would stand for the folder of the configuration.
FilePath = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def is_address(value: str) -> bool:
    """Whether `value` is HOST:PORT with a port from 0 to 65535."""
    match = _ADDRESS.match(value)
    return match is not None and int(match[2]) <= 65535


def _address(value: str) -> str:
    if not is_address(value):
        raise ValueError(f"{value!r} is not HOST:PORT; allowed are ports from 0 to 65535")
    return value


Address = Annotated[str, AfterValidator(_address)]


class BadValue(ValueError):
    """A bad value inside the mapping that a validator checks. `at` is the path from the mapping to
    the value.
    """

    def __init__(self, message: str, at: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.at = at


class Section(BaseModel):
    """A mapping in the file. Unknown keys are errors. Values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The served model."""

    # A folder, a hub id, or demo.
    path: FilePath = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Tokens; capped at the maximum of the model.
    # The shortest request has one token of the prompt and one of the answer.
    max_model_len: Annotated[int, Field(ge=2, strict=True)] | None = None


# auto: the dtype of the model.
KvDtype = Literal["auto", "int8"]
# Tokens per block.
BlockSize = Annotated[int, Field(ge=1, le=1024, strict=True)]
Memory = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class KvConfig(Section):
    """The KV cache of the workers of both pools, unless a pool overrides it."""

    dtype: KvDtype = "auto"
    # Tokens; the CPU kernels read this many at once.
    block_size: BlockSize = 32
    # Bytes per worker.
    memory: Memory = 2**30
    digest: bool = True
    prefix_cache: bool = True


class PoolKvConfig(Section):
    """Overrides of `kv` for one pool. The hand-off converts between the formats."""

    dtype: KvDtype | None = None
    block_size: BlockSize | None = None
    memory: Memory | None = None


class Resources(Section):
    """Resources that Ray reserves for one worker."""

    num_cpus: Annotated[float, Field(ge=0, le=_MAX_CORES, allow_inf_nan=False)] = 1
    num_gpus: Annotated[float, Field(ge=0, le=_MAX_GPUS, allow_inf_nan=False)] = 0
    # Custom resources bind a pool to the nodes that offer them.
    custom: dict[str, Annotated[float, Field(gt=0, le=_MAX_CUSTOM, allow_inf_nan=False)]] = {}

    @field_validator("custom")
    @classmethod
    def _not_rays_own(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not name or name in _RAYS_OWN:
                raise ValueError(
                    f"{name!r} is not the name of a custom resource; set CPUs with num_cpus, GPUs "
                    "with num_gpus, and leave memory out"
                )
        return value


# Number of processes that share one worker's model.
TensorParallel = Annotated[int, Field(ge=1, le=64, strict=True)]
# auto: the checkpoint's dtype. int8: linear layers with 8-bit weights and activations.
Weights = Literal["auto", "int8"]


class PrefillConfig(Section):
    """The prefill pool."""

    replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    # Threads of each process of a worker.
    threads: PositiveInt = 1
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    # Prompt tokens per step.
    chunk_tokens: PositiveInt = 512


class SpeculationConfig(Section):
    """N-gram speculation: drafts the next tokens from earlier tokens that followed the same n
    tokens, and verifies several tokens in one step.
    """

    kind: Literal["ngram"] = "ngram"
    # Most draft tokens for one sequence in one step.
    tokens: Annotated[int, Field(ge=1, le=64, strict=True)] = 4
    # Least number of tokens that must match.
    min_ngram: PositiveInt = 2
    # Most tokens that are compared; the longest match wins.
    max_ngram: PositiveInt = 4
    # Sequences. In a larger batch, reading the weights no longer bounds a step, so speculation is
    # off.
    max_batch: PositiveInt = 8

    @model_validator(mode="after")
    def _ordered(self) -> SpeculationConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; set min_ngram to "
                "max_ngram or less"
            )
        return self


class DecodeConfig(Section):
    """The decode pool."""

    replicas: Annotated[int, Field(gt=0, le=MAX_POOL, strict=True)] = 1
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    # Threads of each process of a worker.
    threads: PositiveInt = 1
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    # Batch slots of one worker: sequences that are decoding, prefilling or reserved.
    max_batch: PositiveInt = 32
    # Prompt tokens that one step prefills beside the batch.
    chunk_tokens: PositiveInt = 256
    speculation: SpeculationConfig | None = None


class TransferConfig(Section):
    """The hand-off of KV between the pools. `lease_s` is in seconds."""

    transport: TransportName = "auto"
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0

    @property
    def bypasses_tls(self) -> bool:
        """Whether KV travels on the transport's own connections, which support neither
        authentication nor encryption.
        """
        return self.transport in ("gloo", "nccl", "nixl")


class RouterConfig(Section):
    """Routing, queueing and retries in the router."""

    policy: PolicyName = "kv_aware"
    local_below_tokens: Count = 64
    max_queue: PositiveInt = 1024
    max_attempts: PositiveInt = 5
    default_deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    # Preempts running requests in favour of tenants below their share.
    preemption: bool = True


class RedisConfig(Section):
    """The Redis that holds the shared state of the cluster."""

    url: str = "embedded"
    # Replicas that must acknowledge the controllers' lease before the lease is valid.
    confirm_replicas: Annotated[int, Field(ge=0, le=16)] = 0

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not _REDIS_URL.match(value):
            raise ValueError(
                "not the URL of a Redis; allowed are embedded, redis://HOST:PORT/DB, "
                "rediss://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE and "
                "unix:///PATH"
            )
        Sentinels.parse(value)
        return value


class MetricTarget(Section):
    """One autoscaling metric and its target value."""

    name: MetricName
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PoolPolicy(Section):
    """The autoscaling policy of one pool. Delays are in seconds."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    max_replicas: Annotated[int, Field(gt=0, le=MAX_POOL, strict=True)] = 1
    metrics: tuple[MetricTarget, ...] = ()
    upscale_delay_s: Seconds = 5.0
    downscale_delay_s: Seconds = 30.0
    max_step_up: PositiveInt = 2
    max_step_down: PositiveInt = 1
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1

    @model_validator(mode="after")
    def _ordered(self) -> PoolPolicy:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}; set "
                "min_replicas to max_replicas or less"
            )
        return self


class AutoscalingPolicy(Section):
    """One policy per pool. A pool without a policy keeps its configured size."""

    prefill: PoolPolicy | None = None
    decode: PoolPolicy | None = None
    # Workers move from a pool with a worker to spare to a pool that grows.
    rebalance: bool = False
    # Loaded workers without a pool. They replace dead workers.
    standby: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def pool(self, name: PoolName) -> PoolPolicy | None:
        """Returns the policy of a pool; None if the pool has no policy."""
        return self.prefill if name == "prefill" else self.decode


class KeyPairConfig(Section):
    """PEM files. Each file is read by the processes that use it."""

    # The certificate, followed by the intermediate certificates up to the CA.
    cert: FilePath
    # Without a password.
    key: FilePath


class PublicKeyPairConfig(KeyPairConfig):
    """PEM files of the listeners for clients."""

    # Clients must present a certificate that this CA signed. null: no client certificate.
    client_ca: FilePath | None = None


class TlsConfig(Section):
    """Certificates of the connections inside the cluster, which use mutual TLS, and of the
    connections from clients.
    """

    # Signs the certificate of every component.
    ca: FilePath
    # For routers and controllers.
    router: KeyPairConfig
    worker: KeyPairConfig
    # The certificate for clients; null: the router's.
    public: PublicKeyPairConfig | None = None


class SecurityConfig(Section):
    """TLS and authentication."""

    tls: TlsConfig | None = None
    # The tenants and their tokens.
    tokens_file: FilePath | None = None


class ListenConfig(Section):
    """Addresses of the listeners. Router addresses are HOST:PORT."""

    grpc: Address = "127.0.0.1:50051"
    http: Address = "127.0.0.1:8000"
    admin: Address = "127.0.0.1:50052"
    # The host that workers bind and announce. auto: the address of the worker's Ray node. Use a
    # private network only.
    worker_host: str = "127.0.0.1"

    @property
    def workers_on_loopback(self) -> bool:
        """Whether workers listen on a loopback address."""
        return is_loopback(f"{self.worker_host}:0")


class ClusterConfig(Section):
    """The whole configuration of a cluster."""

    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    redis: RedisConfig = RedisConfig()
    # The policy file, relative to this file.
    autoscaling: FilePath | None = None
    listen: ListenConfig = ListenConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _chunks_hold_blocks(self) -> ClusterConfig:
        for pool in POOLS:
            chunk = self.pool(pool).chunk_tokens
            size = self.pool_kv(pool).block_size
            if chunk < size:
                raise ValueError(
                    f"{pool}.chunk_tokens {chunk} is below kv.block_size {size}; set "
                    f"{pool}.chunk_tokens to at least {size}"
                )
        return self

    @model_validator(mode="after")
    def _ranks_can_run(self) -> ClusterConfig:
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
    def _others_are_kept_out(self) -> ClusterConfig:
        """Rejects an address that other machines can reach unless authentication and encryption are
        configured.
        """
        needs = {
            "security.tls": self.security.tls,
            "security.tokens_file": self.security.tokens_file,
        }
        for endpoint in ENDPOINTS:
            address: str = getattr(self.listen, endpoint)
            missing = [name for name, value in needs.items() if value is None]
            if missing and not is_loopback(address):
                raise BadValue(_exposed(address, missing), ("listen", endpoint))
        if self.security.tls is None and not self.listen.workers_on_loopback:
            raise BadValue(
                _exposed(self.listen.worker_host, ["security.tls"]), ("listen", "worker_host")
            )
        return self

    @property
    def bound_to_pools(self) -> tuple[str, str] | None:
        """Returns the key by which a worker of one pool cannot serve in the other pool, and the
        reason. Returns None if a worker can serve in both.

        A worker allocates its KV memory again for each role, so `kv` may differ.
        """
        for key in ("resources", "tensor_parallel", "threads", "weights"):
            if getattr(self.prefill, key) != getattr(self.decode, key):
                return key, "differs between the pools"
        if self.prefill.tensor_parallel > 1:
            return "tensor_parallel", "is not 1, and ranks load their weights with each role"
        return None

    def pool(self, name: PoolName) -> PrefillConfig | DecodeConfig:
        """Returns the section of a pool."""
        return self.prefill if name == "prefill" else self.decode

    def pool_kv(self, pool: PoolName) -> KvConfig:
        """Returns `kv` with the overrides of the pool."""
        return self.kv.model_copy(update=self.pool(pool).kv.model_dump(exclude_none=True))


def _exposed(address: str, missing: list[str]) -> str:
    return (
        f"{address} is not a loopback address and needs {' and '.join(missing)}; set "
        f"{'it' if len(missing) == 1 else 'both'}, or listen on 127.0.0.1, localhost or [::1]"
    )


def is_loopback(address: str) -> bool:
    """Whether the host of HOST:PORT is a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
