"""A cluster's configuration: one YAML file, frozen once loaded."""

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
from kvrelay.types import POOLS, PoolName

_SIZE = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?$")
_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})$")
_REDIS_URL = re.compile(r"^(embedded|rediss?(\+sentinel)?://.+|unix:///.+)$")
_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
_UNIT = {
    None: 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

TransportName = Literal["auto", "memory", "shm", "cuda_ipc", "grpc", "gloo", "nccl", "nixl"]
PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]
MetricName = Literal[
    "queue_depth", "queue_tokens", "queue_wait_p95_ms", "kv_occupancy", "ttft_p95_ms", "itl_p95_ms"
]
ENDPOINTS = ("grpc", "http", "admin")  # listeners of a router, by their keys in `listen`
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def is_address(value: str) -> bool:
    """HOST:PORT."""
    match = _ADDRESS.match(value)
    return match is not None and int(match[2]) <= 65535


def _address(value: str) -> str:
    if not is_address(value):
        raise ValueError(f"{value!r} is not HOST:PORT with a port from 0 to 65535")
    return value


Address = Annotated[str, AfterValidator(_address)]


def parse_size(text: str | int) -> int:
    """Bytes from `1GiB`, `512 MB` or a plain number; raises ValueError with the allowed units."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write a number with one of B, KiB, MiB, GiB, KB, MB, GB"
        )
    return int(float(match[1]) * _UNIT[match[2]])


class BadValue(ValueError):
    """Of a key inside the mapping that is checked; `at` is the way to it from there."""

    def __init__(self, message: str, at: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.at = at


class Section(BaseModel):
    """A mapping of the file. Unknown keys are errors, values do not change once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    path: str = "demo"  # a folder, a hub id, or demo
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: PositiveInt | None = None  # cut to what the model allows


KvDtype = Literal["auto", "int8"]  # auto: the model's own
BlockSize = Annotated[int, Field(ge=1, le=1024, strict=True)]  # tokens
Memory = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


class KvConfig(Section):
    dtype: KvDtype = "auto"
    block_size: BlockSize = 32  # what the CPU kernels read at once
    memory: Memory = 2**30  # per worker
    digest: bool = True
    prefix_cache: bool = True


class PoolKvConfig(Section):
    """What one pool has unlike the other; the hand-off converts."""

    dtype: KvDtype | None = None
    block_size: BlockSize | None = None
    memory: Memory | None = None


class Resources(Section):
    """What Ray reserves for one worker."""

    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1
    num_gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    # Bind a pool to nodes that offer them
    custom: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}

    @field_validator("custom")
    @classmethod
    def _not_rays_own(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not name or name in _RAYS_OWN:
                raise ValueError(
                    f"{name!r} is not a custom resource; Ray's own are num_cpus and num_gpus here"
                )
        return value


# Processes that share one worker's model
TensorParallel = Annotated[int, Field(ge=1, le=64, strict=True)]
# Auto: the checkpoint's own; int8: linear layers in 8 bits, activations too
Weights = Literal["auto", "int8"]


class PrefillConfig(Section):
    replicas: Count = 1
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    threads: PositiveInt = 1  # of each of these processes
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    chunk_tokens: PositiveInt = 512  # prompt tokens in one step


class SpeculationConfig(Section):
    """Guesses the next tokens from earlier ones that followed the same n tokens, and computes
    several in one step.
    """

    kind: Literal["ngram"] = "ngram"
    # Guessed at most for one sequence in one step
    tokens: Annotated[int, Field(ge=1, le=64, strict=True)] = 4
    min_ngram: PositiveInt = 2  # tokens that must have come before alike
    max_ngram: PositiveInt = 4  # tokens that are compared; the longest match wins
    # Sequences; where more decode, a step is no longer bound by reading the weights
    max_batch: PositiveInt = 8

    @model_validator(mode="after")
    def _ordered(self) -> SpeculationConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class DecodeConfig(Section):
    replicas: PositiveInt = 1
    resources: Resources = Resources()
    tensor_parallel: TensorParallel = 1
    threads: PositiveInt = 1  # of each of these processes
    weights: Weights = "auto"
    kv: PoolKvConfig = PoolKvConfig()
    max_batch: PositiveInt = 32  # sequences on one worker: decoding, prefilling, or reserved
    chunk_tokens: PositiveInt = 256  # prompt tokens prefilled beside the batch in one step
    speculation: SpeculationConfig | None = None


class TransferConfig(Section):
    transport: TransportName = "auto"
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0

    @property
    def bypasses_tls(self) -> bool:
        """KV travels on connections of the transport's own, which know neither authentication nor
        encryption.
        """
        return self.transport in ("gloo", "nccl", "nixl")


class RouterConfig(Section):
    policy: PolicyName = "kv_aware"
    local_below_tokens: Count = 64
    max_queue: PositiveInt = 1024
    max_attempts: PositiveInt = 5
    default_deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    preemption: bool = True  # running requests give way to those of tenants below their share


class RedisConfig(Section):
    url: str = "embedded"
    # Replicas that must have the controllers' lease before it counts.
    confirm_replicas: Annotated[int, Field(ge=0, le=16)] = 0

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not _REDIS_URL.match(value):
            raise ValueError(
                "allowed are embedded, redis://HOST:PORT/DB, rediss://HOST:PORT/DB, "
                "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE and unix:///PATH"
            )
        Sentinels.parse(value)
        return value


class MetricTarget(Section):
    name: MetricName
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PoolPolicy(Section):
    min_replicas: Count = 1
    max_replicas: PositiveInt = 1
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
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )
        return self


class AutoscalingPolicy(Section):
    """One entry per pool; a pool without one keeps the size it was given."""

    prefill: PoolPolicy | None = None
    decode: PoolPolicy | None = None
    # Workers change over from a pool that has one to spare to one that grows
    rebalance: bool = False
    # Loaded workers of no pool, which replace the dead
    standby: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def pool(self, name: PoolName) -> PoolPolicy | None:
        return self.prefill if name == "prefill" else self.decode


class KeyPairConfig(Section):
    """PEM files, each read by the processes that it is for."""

    cert: str  # the certificate, then those between it and the CA
    key: str  # without a password


class PublicKeyPairConfig(KeyPairConfig):
    # Clients must show a certificate that it signed; null: they show none
    client_ca: str | None = None


class TlsConfig(Section):
    """Certificates of the cluster's own connections, which are mutual, and of those that clients
    make.
    """

    ca: str  # signs every component's certificate
    router: KeyPairConfig  # of routers and controllers
    worker: KeyPairConfig
    public: PublicKeyPairConfig | None = None  # what clients see; null: the router's


class SecurityConfig(Section):
    tls: TlsConfig | None = None
    tokens_file: str | None = None  # tenants and their tokens


class ListenConfig(Section):
    grpc: Address = "127.0.0.1:50051"
    http: Address = "127.0.0.1:8000"
    admin: Address = "127.0.0.1:50052"
    # That workers bind and announce, auto: their Ray node's; private network only
    worker_host: str = "127.0.0.1"

    @property
    def workers_on_loopback(self) -> bool:
        return is_loopback(f"{self.worker_host}:0")


class ClusterConfig(Section):
    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    redis: RedisConfig = RedisConfig()
    autoscaling: str | None = None  # policy file, relative to this one
    listen: ListenConfig = ListenConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _chunks_hold_blocks(self) -> ClusterConfig:
        for pool in POOLS:
            chunk = self.pool(pool).chunk_tokens
            size = self.pool_kv(pool).block_size
            if chunk < size:
                raise ValueError(f"{pool}.chunk_tokens {chunk} is below kv.block_size {size}")
        return self

    @model_validator(mode="after")
    def _ranks_can_run(self) -> ClusterConfig:
        for pool in POOLS:
            section = self.pool(pool)
            degree, gpus = section.tensor_parallel, section.resources.num_gpus
            if degree > 1 and gpus and (gpus < degree or gpus != int(gpus)):
                raise BadValue(
                    f"{gpus:g} GPUs do not do for {pool}.tensor_parallel {degree}, whose ranks "
                    f"need a whole one each; set {degree} or a whole number above it, or 0 for the "
                    "CPU",
                    (pool, "resources", "num_gpus"),
                )
            if degree > 1 and section.weights == "int8":
                raise BadValue(
                    f"int8 needs the native kernels, which {pool}.tensor_parallel {degree} does "
                    f"not run; leave out one",
                    (pool, "weights"),
                )
        return self

    @model_validator(mode="after")
    def _others_are_kept_out(self) -> ClusterConfig:
        """An address that others can reach needs what tells them apart and hides what they say."""
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
        """A key of the pools by which a worker of one cannot serve in the other, and what of it;
        None if it can.

        KV memory is made anew for each role, so `kv` may differ.
        """
        for key in ("resources", "tensor_parallel", "threads", "weights"):
            if getattr(self.prefill, key) != getattr(self.decode, key):
                return key, "is not the other pool's"
        if self.prefill.tensor_parallel > 1:
            return "tensor_parallel", "is not 1, and ranks load their weights with each role"
        return None

    def pool(self, name: PoolName) -> PrefillConfig | DecodeConfig:
        return self.prefill if name == "prefill" else self.decode

    def pool_kv(self, pool: PoolName) -> KvConfig:
        """`kv` with what the pool has of its own."""
        return self.kv.model_copy(update=self.pool(pool).kv.model_dump(exclude_none=True))


def _exposed(address: str, missing: list[str]) -> str:
    return (
        f"{address} is not a loopback address and needs {' and '.join(missing)}; set what is "
        "missing, or listen on 127.0.0.1, localhost or [::1]"
    )


def is_loopback(address: str) -> bool:
    """Of HOST:PORT."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
