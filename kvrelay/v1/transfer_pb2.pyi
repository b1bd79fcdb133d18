from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvOpen(_message.Message):
    __slots__ = ("request_id", "attempt", "lease_id", "epoch", "generation", "layout_hash", "transport", "segment", "rendezvous")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    segment: SharedSegment
    rendezvous: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_id: _Optional[int] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., layout_hash: _Optional[str] = ..., transport: _Optional[str] = ..., segment: _Optional[_Union[SharedSegment, _Mapping]] = ..., rendezvous: _Optional[str] = ...) -> None: ...

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

class KvBlocks(_message.Message):
    __slots__ = ("sequence", "first", "count", "digest", "payload", "source_blocks", "num_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first: int
    count: int
    digest: int
    payload: bytes
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[int] = ..., payload: _Optional[bytes] = ..., source_blocks: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("frames", "digest", "first_token", "num_tokens")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    frames: int
    digest: int
    first_token: int
    num_tokens: int
    def __init__(self, frames: _Optional[int] = ..., digest: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

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
