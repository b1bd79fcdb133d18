"""Value types that several components share. Frozen, slotted, without I/O."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from kvrelay.protocol import Protocol

PoolName = Literal["prefill", "decode"]
# The role of a worker's process: a pool, or standby for either pool.
Role = Literal["prefill", "decode", "standby"]
Path = Literal["disaggregated", "local"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
# See `kvrelay.worker.worker.Worker.state`.
WorkerState = Literal["starting", "ready", "draining", "stuck"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
# Dtype of the scales of quantised values.
SCALE_DTYPE = "bfloat16"
_FINGERPRINT = re.compile(r"fp_([A-Za-z0-9_-]{0,64})\.([A-Za-z0-9_-]{0,64})")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. `router.frontend.validation` validates the values; this class does
    not.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. The sample at absolute position p
    of a sequence depends only on (seed, p) and the logits. `logprobs` None: none; N >= 0: the
    sampled token and the N most likely tokens.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of the sampled token, and (token id, logprob) of the most likely
    tokens.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The complete state of a sequence to run. Any worker of the pool can continue it."""

    request_id: str
    attempt: int
    # The prompt, then the tokens that earlier attempts emitted.
    token_ids: tuple[int, ...]
    prompt_len: int
    # The seed is set.
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    # Time left when the spec was sent. A duration, because the clocks of machines may differ.
    deadline_s: float | None = None
    # The tenant to which the cached blocks of this sequence are charged.
    tenant: str = ""
    # Weight of the tenant: its share of the worker relative to other tenants.
    weight: float = 1.0

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the attempt: (request id, attempt)."""
        return self.request_id, self.attempt

    @property
    def num_emitted(self) -> int:
        """Number of tokens that earlier attempts emitted."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class LayerKv:
    """KV of one layer and one token: `kv_heads` vectors of `k_dim` values, and as many of `v_dim`
    values.
    """

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class KvRegion:
    """One tensor of all blocks: [num_blocks, *block_shape] of `dtype`, row-major."""

    block_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of KV in an arena of bytes: region after region, without gaps.

    In each region, block n begins at n times the region's block bytes. So a run of adjacent blocks
    is one contiguous range per region. int8 is quantised, with one scale for each token's vector in
    each head; the scales are in separate regions.

    Within a block, tokens follow each other: [block_size, kv_heads, dim]. If `word` is set, it is
    the number of values per four-byte packed element, in the dtype that the model attends in. Then
    heads come first, and the order is the one that the CPU kernels read (see
    `engine/native/kernels/panels.h`).

    With tensor parallelism, each rank has an equal share of the heads in its own arena. The arenas
    follow each other. Block n of the whole consists of block n of each arena.
    """

    # With the heads of all ranks.
    layers: tuple[LayerKv, ...]
    # Tokens.
    block_size: int
    # Dtype of K and V.
    dtype: str
    word: int | None = None
    ranks: int = 1

    @property
    def regions(self) -> tuple[KvRegion, ...]:
        """K of layer 0, V of layer 0, K of layer 1, and so on. With quantised KV, the scales come
        first, in the same order.

        The scales come first because they are wider: so every region is aligned for any number of
        blocks. The list repeats for each rank.
        """
        return self._regions_of_rank * self.ranks

    @property
    def share(self) -> KvLayout:
        """The layout of one rank's arena."""
        if self.ranks == 1:
            return self
        layers = tuple(
            replace(layer, kv_heads=layer.kv_heads // self.ranks) for layer in self.layers
        )
        return replace(self, layers=layers, ranks=1)

    @property
    def _regions_of_rank(self) -> tuple[KvRegion, ...]:
        layers = self.share.layers
        scales = [
            KvRegion(self._scale_shape(layer), SCALE_DTYPE)
            for layer in layers
            for _ in ("k", "v")
            if self.dtype == "int8"
        ]
        values = [
            KvRegion(shape, self.dtype)
            for layer in layers
            for shape in (self._k_shape(layer), self._v_shape(layer))
        ]
        return (*scales, *values)

    def _scale_shape(self, layer: LayerKv) -> tuple[int, ...]:
        return (layer.kv_heads, self.block_size) if self.word else (self.block_size, layer.kv_heads)

    def _k_shape(self, layer: LayerKv) -> tuple[int, ...]:
        if self.word:
            return (layer.kv_heads, self.block_size * layer.k_dim)
        return (self.block_size, layer.kv_heads, layer.k_dim)

    def _v_shape(self, layer: LayerKv) -> tuple[int, ...]:
        if self.word:
            return (layer.kv_heads, self.block_size * layer.v_dim)
        return (self.block_size, layer.kv_heads, layer.v_dim)

    @property
    def region_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each region."""
        return tuple(
            math.prod(region.block_shape) * DTYPE_BYTES[region.dtype] for region in self.regions
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions of all ranks."""
        return sum(self.region_block_bytes)

    def arena_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of an arena with `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def hash(self, model_id: str) -> str:
        """Returns a hash that is equal on two workers if and only if they can exchange blocks
        without conversion.
        """
        text = f"{model_id}|{self.layers}|{self.block_size}|{self.dtype}|{self.word}|{self.ranks}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks for `num_tokens` tokens, rounded up."""
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` are part of the prompt tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Handoff:
    """One KV hand-off. bytes = blocks x block_bytes. The `cached_blocks` were not sent, because the
    receiver had them.
    """

    transport: str
    blocks: int
    block_bytes: int
    bytes: int
    cached_blocks: int
    # From the first frame to the acknowledged commit.
    seconds: float
    # From the end of the prefill's compute to the acknowledged commit.
    exposed_seconds: float
    # Why this transport was chosen.
    why: str = ""


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """The times and token counts of one prefill, measured by the worker."""

    # From the acceptance by the worker to the first chunk.
    queue_seconds: float
    # From the first chunk to the first token.
    compute_seconds: float
    # Tokens that needed no compute.
    cached_tokens: int
    chunks: int
    # Part of the cached tokens that came from another worker's prefix cache.
    fetched_tokens: int = 0
    # Part of queue_seconds.
    fetch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to serve a request: the workers, the reason for their choice, and the outcome."""

    path: Path
    why: str
    prefill_worker: str
    decode_worker: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a request went, by the router's clock. The `phases` add up to
    `ttft_seconds`.
    """

    phases: tuple[tuple[str, float], ...] = ()
    ttft_seconds: float = 0.0
    second_token_gap_seconds: float = 0.0
    decode_seconds: float = 0.0
    e2e_seconds: float = 0.0
    handoff: Handoff | None = None
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load that a worker reports with each heartbeat."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    leases: int = 0
    tokens_per_second: float = 0.0
    weight_bytes: int = 0
    kv_bytes: int = 0
    rss_bytes: int = 0
    shared_bytes: int = 0
    integrity_ok: bool = True
    integrity_error: str = ""
    preemptions: int = 0
    # Tokens that speculation drafted.
    draft_tokens: int = 0
    # Draft tokens that were accepted.
    accepted_tokens: int = 0
    queue_wait_p95_ms: float = 0.0
    # A notice that the worker's certificate expires soon or has expired.
    certificate_note: str = ""
    # Age of the current step; 0 between steps.
    step_age_s: float = 0.0
    # Share in use: of a prefill worker's time, or of a decode worker's batch slots or blocks.
    busy_share: float = 0.0
    # Part of blocks_held: blocks for prompts whose KV has not arrived yet.
    blocks_leased: int = 0

    @property
    def empty(self) -> bool:
        """Whether the worker has no running or waiting sequence and no lease."""
        return not (self.running or self.waiting or self.leases)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A hash of the model files that a worker loaded, or that gave the tokens of an answer.

    Workers of protocol 0 know only `sampled`, a hash of some of the bytes; `full` is then empty.
    """

    full: str = ""
    sampled: str = ""

    def is_same(self, other: ModelVersion) -> bool:
        """Compares the full hashes if both have one, otherwise the sampled hashes."""
        if self.full and other.full:
            return self.full == other.full
        return self.sampled == other.sampled

    @property
    def fingerprint(self) -> str:
        """The fingerprint that clients see. `from_fingerprint` parses it."""
        return f"fp_{self.full}.{self.sampled}" if self.full or self.sampled else ""

    @classmethod
    def from_fingerprint(cls, text: str) -> ModelVersion:
        """Parses a fingerprint. Raises ValueError for any other text."""
        found = _FINGERPRINT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r:.100} is not the fingerprint of a model")
        return cls(*found.groups())


UNKNOWN_MODEL = ModelVersion()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's entry in the registry."""

    worker_id: str
    pool: PoolName
    epoch: int
    state: WorkerState
    # HOST:PORT of the worker's gRPC server.
    address: str
    model_id: str
    layout_hash: str
    block_size: int
    block_bytes: int
    host_id: str
    max_model_len: int
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # Process id on the worker's host.
    pid: int = 0
    # Number of processes that share the model's weights and KV heads, including this one.
    tensor_parallel: int = 1
    # The controller that owns the worker's process.
    started_by: str = ""
    # Term of that controller's lease when it started the worker.
    term: int = 0
    protocol: Protocol = field(default_factory=Protocol)
    # The id of the same model on workers of protocol 0.
    sampled_model_id: str = ""
    # Hash of the files that define the vocabulary.
    tokenizer_id: str = ""
    # 0: the worker does not report it.
    vocab_size: int = 0

    @property
    def model(self) -> ModelVersion:
        """The version of the model files that the worker loaded."""
        if self.protocol.version < 1:
            return ModelVersion("", self.model_id)
        return ModelVersion(self.model_id, self.sampled_model_id)


@dataclass(frozen=True, slots=True)
class StandbyWorker:
    """A worker without a pool. Its weights are loaded, and it can join either pool within a
    second.
    """

    worker_id: str
    # ready: the engine has run real steps.
    state: Literal["starting", "ready"]
    host_id: str
    # Process id on the worker's host.
    pid: int
    weight_bytes: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class PendingWorker:
    """A requested worker that no node has room for."""

    worker_id: str
    pool: Role
    # The missing resources.
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The controllers' lease, as stored in Redis. `owner` is empty while the lease is free."""

    owner: str = ""
    term: int = 0
    # Number of renewals in this term.
    beat: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Proof of leadership that a controller sends with each of its writes."""

    owner: str
    term: int


ControllerState = Literal["standby", "claiming", "leading"]


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """A controller's entry in the registry."""

    controller_id: str
    state: ControllerState
    # Term of the controller's lease; 0 without a lease.
    term: int = 0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A change of a pool's size, with its reason. `unix_time` is in seconds."""

    unix_time: float
    pool: PoolName
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """A router's entry in the registry. p95 values cover the last measuring window; None if nothing
    was measured in it.
    """

    router_id: str
    running: int = 0
    # Requests for which no decode worker has reserved blocks.
    waiting: int = 0
    # Prompt tokens of the waiting requests.
    waiting_tokens: int = 0
    finished: int = 0
    failed: int = 0
    rss_bytes: int = 0
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    certificate_note: str = ""
    # Protocol version of the router.
    protocol: int = 0
