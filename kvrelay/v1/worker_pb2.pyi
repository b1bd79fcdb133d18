from kvrelay.v1 import cluster_pb2 as _cluster_pb2
from kvrelay.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceSpec(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "prompt_len", "sampling", "salt", "priority", "deadline_s", "tenant", "weight", "itl_s", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    sampling: _inference_pb2.SamplingParams
    salt: str
    priority: int
    deadline_s: float
    tenant: str
    weight: float
    itl_s: float
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., itl_s: _Optional[float] = ..., adapter: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("spec", "lease_seconds", "prefill_worker")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    lease_seconds: float
    prefill_worker: str
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., prefill_worker: _Optional[str] = ...) -> None: ...

class HandoffTarget(_message.Message):
    __slots__ = ("worker_id", "address", "epoch", "lease_id", "generation", "num_blocks", "cached_tokens", "layout_hash", "host_id", "transport", "device", "capability", "protocol")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    epoch: int
    lease_id: int
    generation: int
    num_blocks: int
    cached_tokens: int
    layout_hash: str
    host_id: str
    transport: str
    device: str
    capability: str
    protocol: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., generation: _Optional[int] = ..., num_blocks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., layout_hash: _Optional[str] = ..., host_id: _Optional[str] = ..., transport: _Optional[str] = ..., device: _Optional[str] = ..., capability: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker_id", "address", "cached_tokens", "capability")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    cached_tokens: int
    capability: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., capability: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("spec", "target", "source")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    target: HandoffTarget
    source: PrefixSource
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ..., target: _Optional[_Union[HandoffTarget, _Mapping]] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class RunLocal(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: SequenceSpec
    def __init__(self, spec: _Optional[_Union[SequenceSpec, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("lease_ids", "lease_seconds")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_seconds: float
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol: _cluster_pb2.Protocol
    def __init__(self, router_id: _Optional[str] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class ResyncCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "run_local", "renew", "abort", "resync_cache")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RUN_LOCAL_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_CACHE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    reserve: Reserve
    prefill: Prefill
    run_local: RunLocal
    renew: Renew
    abort: Abort
    resync_cache: ResyncCache
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., run_local: _Optional[_Union[RunLocal, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., resync_cache: _Optional[_Union[ResyncCache, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "lending_key", "protocol")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENDING_KEY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    lending_key: bytes
    protocol: _cluster_pb2.Protocol
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lending_key: _Optional[bytes] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "attempt", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    target: HandoffTarget
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., target: _Optional[_Union[HandoffTarget, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PrefillTimings(_message.Message):
    __slots__ = ("queue_seconds", "compute_seconds", "cached_tokens", "chunks", "fetched_tokens", "fetch_seconds", "fetched_from")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FROM_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    compute_seconds: float
    cached_tokens: int
    chunks: int
    fetched_tokens: int
    fetch_seconds: float
    fetched_from: str
    def __init__(self, queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., chunks: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., fetch_seconds: _Optional[float] = ..., fetched_from: _Optional[str] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_ids", "logprobs", "finish_reason", "prefill", "prompt_logprobs", "dropped_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: str
    prefill: PrefillTimings
    prompt_logprobs: _inference_pb2.PromptLogprobs
    dropped_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., prefill: _Optional[_Union[PrefillTimings, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceTokens]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceTokens, _Mapping]]] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("request_id", "attempt", "handoff")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    handoff: _inference_pb2.Handoff
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., handoff: _Optional[_Union[_inference_pb2.Handoff, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CacheUpdate(_message.Message):
    __slots__ = ("number", "begins", "complete", "tier", "stored", "removed", "blocks", "checksum")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    number: int
    begins: bool
    complete: bool
    tier: int
    stored: bytes
    removed: bytes
    blocks: int
    checksum: int
    def __init__(self, number: _Optional[int] = ..., begins: bool = ..., complete: bool = ..., tier: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., blocks: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "reserved", "refused", "tokens", "handed_off", "failed", "cache")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reserved: Reserved
    refused: Refused
    tokens: TokenBatch
    handed_off: HandedOff
    failed: Failed
    cache: CacheUpdate
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., cache: _Optional[_Union[CacheUpdate, _Mapping]] = ...) -> None: ...

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _cluster_pb2.WorkerStatus
    def __init__(self, status: _Optional[_Union[_cluster_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
