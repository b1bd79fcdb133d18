from kvrelay.v1 import cluster_pb2 as _cluster_pb2
from kvrelay.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreBlocksRequest(_message.Message):
    __slots__ = ("layout_hash", "identities", "protocol")
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    layout_hash: str
    identities: bytes
    protocol: _cluster_pb2.Protocol
    def __init__(self, layout_hash: _Optional[str] = ..., identities: _Optional[bytes] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class FindBlocksResponse(_message.Message):
    __slots__ = ("found", "protocol")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    protocol: _cluster_pb2.Protocol
    def __init__(self, found: _Optional[bytes] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class ForgetBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreStatusRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: _cluster_pb2.Protocol
    def __init__(self, protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...

class GetStoreStatusResponse(_message.Message):
    __slots__ = ("size_bytes", "used_bytes", "blocks", "tenants", "stored", "evicted", "found", "protocol")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    used_bytes: int
    blocks: int
    tenants: int
    stored: int
    evicted: int
    found: int
    protocol: _cluster_pb2.Protocol
    def __init__(self, size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., tenants: _Optional[int] = ..., stored: _Optional[int] = ..., evicted: _Optional[int] = ..., found: _Optional[int] = ..., protocol: _Optional[_Union[_cluster_pb2.Protocol, _Mapping]] = ...) -> None: ...
