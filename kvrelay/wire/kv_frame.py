"""The frames of a push, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import xxhash

from kvrelay.protocol_version import Protocol, ours
from kvrelay.types.kv_layout import KvLayout

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """The sender's arena as an anonymous memory file: `kvrelay-NONCE` behind /proc/PID/fd/FD,
    `size` bytes.
    """

    pid: int
    fd: int
    size: int
    nonce: int


@dataclass(frozen=True, slots=True)
class RemoteArena:
    """The sender's arena of `size` bytes, for a receiver that reads it without the sender's help.

    nixl: `access` is the metadata of the sender's agent, `start` an address in the sender's
    process. cuda_ipc: `access` is the handle of the allocation, `start` an offset from the
    beginning of the allocation. `device`: the sender's GPU, or -1.
    """

    access: bytes
    start: int
    size: int
    device: int = -1


@dataclass(frozen=True, slots=True)
class KvOpen:
    """Opens a push: names the lease, describes the sender's blocks, and says how their bytes
    travel.
    """

    request_id: str
    attempt: int
    lease_id: int
    epoch: int
    generation: int
    layout_hash: str
    transport: str
    # For memory and shm.
    segment: SharedSegment | None = None
    # For gloo and nccl: HOST:PORT/NAME of the sender's store and of the group in it.
    rendezvous: str = ""
    model_id: str = ""
    # Layout of the sender's arena; None: the same as the receiver's.
    layout: KvLayout | None = None
    # For nixl and cuda_ipc.
    arena: RemoteArena | None = None
    # The algorithm of the block digests.
    digest: str = "xxh3"
    # Worker id.
    sender: str = ""
    # The capability from the target.
    capability: str = field(default="", repr=False)
    # Protocol of the sender.
    protocol: Protocol = field(default_factory=ours)
    # Hash of the files of the adapter that the KV is computed with; empty for the base model.
    adapter: str = ""
    # To a store: the identities of the blocks, one after the other. See `BlockKey`.
    identities: bytes = b""
    # To a store: 16 hexadecimal digits that stand for the tenant.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Some layers of the blocks first to first + count - 1 of the sequence, in the sender's block
    numbering.
    """

    # 0, 1, 2, ... within the push.
    sequence: int
    first: int
    count: int
    first_layer: int
    num_layers: int
    num_bytes: int
    # One digest per block, over the bytes of these layers in plan order. Empty if digests are off.
    digests: tuple[int, ...] = ()
    # For grpc: the bytes, in pieces.
    payload: tuple[Buffer, ...] = ()
    # Block numbers in the sender's arena, if the receiver reads the blocks from there.
    source_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VllmBlocks:
    """Blocks of a prompt in the memory of the sender's vLLM, which the receiver's vLLM reads
    through NIXL.
    """

    # Of the sender's vLLM, and of the prompt in it.
    engine_id: str
    request_id: str
    # Where the sender's vLLM answers NIXL handshakes.
    host: str
    port: int
    # Block numbers in the sender's vLLM, in the order of the tokens.
    blocks: tuple[int, ...]
    # The blocks stay unchanged until then, in seconds of the sender's clock, which is
    # time.perf_counter.
    expires_at: float
    # The same as a duration from the commit, in seconds.
    held_s: float


@dataclass(frozen=True, slots=True)
class KvCommit:
    """Ends a push. `digest` is the result of `commit_digest`."""

    frames: int
    digest: int
    first_token: int
    # Tokens whose KV was sent or is cached.
    num_tokens: int
    # For vllm-nixl: the KV, of which no frame was sent.
    in_vllm: VllmBlocks | None = None


def commit_digest(
    blocks: xxhash.xxh3_64, first_token: int, num_tokens: int, in_vllm: VllmBlocks | None = None
) -> int:
    """Returns XXH3-64 over the digests of all blocks, which `blocks` already contains, the two
    numbers, and the fields of `in_vllm`. Each number is 8 bytes, little endian. The first token is
    included because the answer continues from it, so it must be as correct as the KV.
    """
    whole = blocks.copy()
    for number in (first_token, num_tokens):
        whole.update(number.to_bytes(8, "little", signed=True))
    if in_vllm is not None:
        whole.update(repr(astuple(in_vllm)).encode())
    return whole.intdigest()


Frame = KvOpen | KvBlocks | KvCommit
