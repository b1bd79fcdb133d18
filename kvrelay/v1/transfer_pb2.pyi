from kvrelay.v1 import cluster_pb2 as _cluster_pb2
from kvrelay.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "target", "granted_tokens", "capability", "token_ids", "salt", "adapter", "protocol")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    target: _worker_pb2.HandoffTarget
    granted_tokens: int
    capability: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    adapter: str
    protocol: _cluster_pb2.Protocol
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., target: _Optional[_Union[_worker_pb2.HandoffTarget, _Mapping]] = ..., granted_tokens: _Optional[int] = ..., capability: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class KvOpen(_message.Message):
    __slots__ = ("request_id", "attempt", "lease_id", "epoch", "generation", "layout_hash", "transport", "segment", "rendezvous", "model_id", "layout", "arena", "digest", "sender", "capability", "adapter", "identities", "tenant", "protocol")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    segment: SharedSegment
    rendezvous: str
    model_id: str
    layout: KvLayout
    arena: RemoteArena
    digest: str
    sender: str
    capability: str
    adapter: str
    identities: bytes
    tenant: str
    protocol: _cluster_pb2.Protocol
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., layout_hash: _Optional[str] = ..., transport: _Optional[str] = ..., segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., rendezvous: _Optional[str] = ..., model_id: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., arena: _Optional[_Union[RemoteArena, _Mapping]] = ..., digest: _Optional[str] = ..., sender: _Optional[str] = ..., capability: _Optional[str] = ..., adapter: _Optional[str] = ..., identities: _Optional[bytes] = ..., tenant: _Optional[str] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("layers", "block_size", "dtype", "word", "ranks", "windows")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerKv]
    block_size: int
    dtype: str
    word: int
    ranks: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerKv, _Mapping]]] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., word: _Optional[int] = ..., ranks: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerKv(_message.Message):
    __slots__ = ("kv_heads", "k_dim", "v_dim", "v_in_k")
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    V_IN_K_FIELD_NUMBER: _ClassVar[int]
    kv_heads: int
    k_dim: int
    v_dim: int
    v_in_k: int
    def __init__(self, kv_heads: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., v_in_k: _Optional[int] = ...) -> None: ...

class SharedSegment(_message.Message):
    __slots__ = ("pid", "fd", "size", "nonce")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    size: int
    nonce: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., size: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class RemoteArena(_message.Message):
    __slots__ = ("access", "start", "size", "device")
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    access: bytes
    start: int
    size: int
    device: int
    def __init__(self, access: _Optional[bytes] = ..., start: _Optional[int] = ..., size: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("sequence", "first", "count", "payload", "source_blocks", "num_bytes", "digests", "first_layer", "num_layers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first: int
    count: int
    payload: bytes
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    first_layer: int
    num_layers: int
    def __init__(self, sequence: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., payload: _Optional[bytes] = ..., source_blocks: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("frames", "digest", "first_token", "num_tokens", "in_vllm")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_VLLM_FIELD_NUMBER: _ClassVar[int]
    frames: int
    digest: int
    first_token: int
    num_tokens: int
    in_vllm: VllmBlocks
    def __init__(self, frames: _Optional[int] = ..., digest: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., in_vllm: _Optional[_Union[VllmBlocks, _Mapping]] = ...) -> None: ...

class VllmBlocks(_message.Message):
    __slots__ = ("engine_id", "request_id", "host", "port", "blocks", "expires_at", "held_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    expires_at: float
    held_s: float
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., expires_at: _Optional[float] = ..., held_s: _Optional[float] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("open", "blocks", "commit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    open: KvOpen
    blocks: KvBlocks
    commit: KvCommit
    def __init__(self, open: _Optional[_Union[KvOpen, _Mapping]] = ..., blocks: _Optional[_Union[KvBlocks, _Mapping]] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ...) -> None: ...

class KvReceipt(_message.Message):
    __slots__ = ("blocks", "bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
