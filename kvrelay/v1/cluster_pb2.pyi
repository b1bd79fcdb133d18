from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Protocol(_message.Message):
    __slots__ = ("version", "oldest", "features", "release")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    version: int
    oldest: int
    features: _containers.RepeatedScalarFieldContainer[str]
    release: str
    def __init__(self, version: _Optional[int] = ..., oldest: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., release: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("protocol", "model")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol: Protocol
    model: str
    def __init__(self, protocol: _Optional[_Union[Protocol, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval_seconds", "model")
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    model: str
    def __init__(self, interval_seconds: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("kind", "size_bytes", "used_bytes", "blocks", "hits", "misses", "stored", "evicted", "dropped", "errors", "error", "read_rate", "write_rate", "skipped")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    READ_RATE_FIELD_NUMBER: _ClassVar[int]
    WRITE_RATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    size_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    stored: int
    evicted: int
    dropped: int
    errors: int
    error: str
    read_rate: float
    write_rate: float
    skipped: int
    def __init__(self, kind: _Optional[str] = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., stored: _Optional[int] = ..., evicted: _Optional[int] = ..., dropped: _Optional[int] = ..., errors: _Optional[int] = ..., error: _Optional[str] = ..., read_rate: _Optional[float] = ..., write_rate: _Optional[float] = ..., skipped: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pool", "epoch", "state", "address", "running", "waiting", "waiting_tokens", "blocks_total", "blocks_held", "blocks_cached", "leases", "tokens_per_second", "weight_bytes", "kv_bytes", "rss_bytes", "integrity_ok", "preemptions", "queue_wait_p95_ms", "integrity_error", "pid", "shared_bytes", "draft_tokens", "accepted_tokens", "certificate_note", "step_age_s", "tensor_parallel", "busy_share", "blocks_leased", "prompt_tokens_per_second", "unfit", "protocol", "model_id", "engine", "tiers", "dropped_tokens", "adapters")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_OK_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NOTE_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    epoch: int
    state: str
    address: str
    running: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    blocks_held: int
    blocks_cached: int
    leases: int
    tokens_per_second: float
    weight_bytes: int
    kv_bytes: int
    rss_bytes: int
    integrity_ok: bool
    preemptions: int
    queue_wait_p95_ms: float
    integrity_error: str
    pid: int
    shared_bytes: int
    draft_tokens: int
    accepted_tokens: int
    certificate_note: str
    step_age_s: float
    tensor_parallel: int
    busy_share: float
    blocks_leased: int
    prompt_tokens_per_second: float
    unfit: str
    protocol: int
    model_id: str
    engine: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    dropped_tokens: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., leases: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., integrity_ok: bool = ..., preemptions: _Optional[int] = ..., queue_wait_p95_ms: _Optional[float] = ..., integrity_error: _Optional[str] = ..., pid: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., certificate_note: _Optional[str] = ..., step_age_s: _Optional[float] = ..., tensor_parallel: _Optional[int] = ..., busy_share: _Optional[float] = ..., blocks_leased: _Optional[int] = ..., prompt_tokens_per_second: _Optional[float] = ..., unfit: _Optional[str] = ..., protocol: _Optional[int] = ..., model_id: _Optional[str] = ..., engine: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., dropped_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("name", "desired", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    desired: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, name: _Optional[str] = ..., desired: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class PendingWorker(_message.Message):
    __slots__ = ("worker_id", "pool", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StandbyWorker(_message.Message):
    __slots__ = ("worker_id", "state", "host_id", "pid", "weight_bytes", "rss_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    host_id: str
    pid: int
    weight_bytes: int
    rss_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., host_id: _Optional[str] = ..., pid: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class ControllerStatus(_message.Message):
    __slots__ = ("controller_id", "state", "term")
    CONTROLLER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    controller_id: str
    state: str
    term: int
    def __init__(self, controller_id: _Optional[str] = ..., state: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("unix_time", "pool", "before", "after", "reason")
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    unix_time: float
    pool: str
    before: int
    after: int
    reason: str
    def __init__(self, unix_time: _Optional[float] = ..., pool: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "running", "waiting", "finished", "failed", "rss_bytes", "waiting_tokens", "ttft_p95_ms", "itl_p95_ms", "certificate_note", "waiting_for_prefill", "waiting_prefill_tokens", "waiting_at_limit", "waiting_tokens_at_limit", "processes", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_P95_MS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NOTE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_AT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_AT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    running: int
    waiting: int
    finished: int
    failed: int
    rss_bytes: int
    waiting_tokens: int
    ttft_p95_ms: float
    itl_p95_ms: float
    certificate_note: str
    waiting_for_prefill: int
    waiting_prefill_tokens: int
    waiting_at_limit: int
    waiting_tokens_at_limit: int
    processes: int
    protocol: int
    def __init__(self, router_id: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., ttft_p95_ms: _Optional[float] = ..., itl_p95_ms: _Optional[float] = ..., certificate_note: _Optional[str] = ..., waiting_for_prefill: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., waiting_at_limit: _Optional[int] = ..., waiting_tokens_at_limit: _Optional[int] = ..., processes: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "state", "pools", "decisions", "router", "block_bytes", "block_size", "registry", "restarting", "pending", "standby", "controllers", "protocol", "routing", "autoscaling", "models", "delayed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    AUTOSCALING_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    decisions: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    router: RouterStatus
    block_bytes: int
    block_size: int
    registry: str
    restarting: _containers.RepeatedScalarFieldContainer[str]
    pending: _containers.RepeatedCompositeFieldContainer[PendingWorker]
    standby: _containers.RepeatedCompositeFieldContainer[StandbyWorker]
    controllers: _containers.RepeatedCompositeFieldContainer[ControllerStatus]
    protocol: Protocol
    routing: str
    autoscaling: str
    models: _containers.RepeatedScalarFieldContainer[str]
    delayed: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    def __init__(self, model: _Optional[str] = ..., state: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., decisions: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ..., block_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., registry: _Optional[str] = ..., restarting: _Optional[_Iterable[str]] = ..., pending: _Optional[_Iterable[_Union[PendingWorker, _Mapping]]] = ..., standby: _Optional[_Iterable[_Union[StandbyWorker, _Mapping]]] = ..., controllers: _Optional[_Iterable[_Union[ControllerStatus, _Mapping]]] = ..., protocol: _Optional[_Union[Protocol, _Mapping]] = ..., routing: _Optional[str] = ..., autoscaling: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., delayed: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ...) -> None: ...

class SetPoolSizeRequest(_message.Message):
    __slots__ = ("prefill", "decode", "model", "reason")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    model: str
    reason: str
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetPoolSizeResponse(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestartWorkersRequest(_message.Message):
    __slots__ = ("names", "model")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class RestartWorkersResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "adapter_id", "served", "configured", "workers", "model", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    adapter_id: str
    served: bool
    configured: bool
    workers: int
    model: str
    refused: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., adapter_id: _Optional[str] = ..., served: bool = ..., configured: bool = ..., workers: _Optional[int] = ..., model: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
