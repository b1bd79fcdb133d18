"""Values that more than one component speaks of. Frozen, slotted, free of I/O."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from kvrelay.protocol import Protocol

PoolName = Literal["prefill", "decode"]
# Of a worker's process: a pool, or to take a place in either
Role = Literal["prefill", "decode", "standby"]
Path = Literal["disaggregated", "local"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
# See `kvrelay.worker.base.Worker.state`
WorkerState = Literal["starting", "ready", "draining", "stuck"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_DTYPE = "bfloat16"  # of the scales of quantised values
_FINGERPRINT = re.compile(r"fp_([A-Za-z0-9_-]{0,64})\.([A-Za-z0-9_-]{0,64})")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Values are validated by `router.frontend.validation`; here they are
    taken as they are.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. The draw at absolute position p
    of a sequence depends on (seed, p) and the logits only. `logprobs` None: none; N >= 0: the
    sampled token's and the N most likely.
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
    ones.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to run, complete: any worker of the pool can take it up from here."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]  # the prompt, then the tokens that earlier attempts emitted
    prompt_len: int
    sampling: SamplingParams  # seed is set
    salt: str = ""
    priority: int = 0
    # Left when it was sent: a duration, so that machines' clocks may differ
    deadline_s: float | None = None
    tenant: str = ""  # whose cached blocks its own are counted with
    weight: float = 1.0  # of that tenant: its share of the worker beside other tenants

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def num_emitted(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class LayerKv:
    """KV of one layer and one token: `kv_heads` vectors of `k_dim` and as many of `v_dim`
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
    """How KV lies in an arena of bytes: region after region, without gaps.

    In each region block n lies at n times the region's block bytes; so a run of adjacent blocks is
    one contiguous range per region. int8 is quantised: one scale for each token's vector in each
    head, in regions of their own.

    Within a block, tokens lie one after the other, [block_size, kv_heads, dim]. With `word` values
    to a word of four bytes of the dtype that the model attends in, heads come first and the order
    is the one that the CPU kernels read (see `engine/native/kernels/panels.h`).

    With tensor parallelism each rank has an equal share of the heads, in an arena of its own; these
    lie one after the other, and block n of the whole is block n of each of them.
    """

    layers: tuple[LayerKv, ...]  # with all heads
    block_size: int  # tokens
    dtype: str  # of K and V
    word: int | None = None
    ranks: int = 1

    @property
    def regions(self) -> tuple[KvRegion, ...]:
        """K of layer 0, V of layer 0, K of layer 1, ...; where KV is quantised, before these their
        scales likewise.

        Scales lie first because they are wider: so every region is aligned, whatever the number of
        blocks. All of this for each rank in turn.
        """
        return self._regions_of_rank * self.ranks

    @property
    def share(self) -> KvLayout:
        """Of one rank's arena."""
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
        return sum(self.region_block_bytes)

    def arena_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.block_bytes

    def hash(self, model_id: str) -> str:
        """Equal on two workers if and only if they can exchange blocks as they are."""
        text = f"{model_id}|{self.layers}|{self.block_size}|{self.dtype}|{self.word}|{self.ranks}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Handoff:
    """One KV hand-off. bytes = blocks x block_bytes; cached_blocks were not sent since the receiver
    had them.
    """

    transport: str
    blocks: int
    block_bytes: int
    bytes: int
    cached_blocks: int
    seconds: float  # first frame to acknowledged commit
    exposed_seconds: float  # end of prefill compute to acknowledged commit
    why: str = ""  # why that transport


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    queue_seconds: float  # accepted by the worker to first chunk
    compute_seconds: float  # first chunk to first token
    cached_tokens: int  # that needed no computing
    chunks: int
    fetched_tokens: int = 0  # of the cached ones, from another worker's prefix cache
    fetch_seconds: float = 0.0  # within queue_seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """A worker pair that tried to serve the request, why it was chosen, and how that ended."""

    path: Path
    why: str
    prefill_worker: str
    decode_worker: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a request's time went, on the router's clock; `phases` add up to `ttft_seconds`."""

    phases: tuple[tuple[str, float], ...] = ()
    ttft_seconds: float = 0.0
    second_token_gap_seconds: float = 0.0
    decode_seconds: float = 0.0
    e2e_seconds: float = 0.0
    handoff: Handoff | None = None
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with each heartbeat."""

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
    draft_tokens: int = 0  # guessed by speculation
    accepted_tokens: int = 0  # of these, those that were right
    queue_wait_p95_ms: float = 0.0
    certificate_note: str = ""  # that its certificate ends soon or has ended
    step_age_s: float = 0.0  # of the step that runs; 0 while none does
    # In use: of a prefill worker's time, of a decode worker's batch slots or blocks
    busy_share: float = 0.0
    blocks_leased: int = 0  # of those held: for prompts whose KV is still to come

    @property
    def empty(self) -> bool:
        return not (self.running or self.waiting or self.leases)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Which bytes of a model a worker loaded, or gave the tokens of an answer.

    Workers of protocol 0 know a hash of some bytes only, `sampled`; `full` is empty there.
    """

    full: str = ""
    sampled: str = ""

    def is_same(self, other: ModelVersion) -> bool:
        """By all bytes where both know these, otherwise by those that both know."""
        if self.full and other.full:
            return self.full == other.full
        return self.sampled == other.sampled

    @property
    def fingerprint(self) -> str:
        """What clients are told of it; `from_fingerprint` reads it back."""
        return f"fp_{self.full}.{self.sampled}" if self.full or self.sampled else ""

    @classmethod
    def from_fingerprint(cls, text: str) -> ModelVersion:
        """Raises ValueError for what is no fingerprint."""
        found = _FINGERPRINT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r:.100} is no fingerprint of a model")
        return cls(*found.groups())


UNKNOWN_MODEL = ModelVersion()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's entry in the registry."""

    worker_id: str
    pool: PoolName
    epoch: int
    state: WorkerState
    address: str  # HOST:PORT of its gRPC server
    model_id: str
    layout_hash: str
    block_size: int
    block_bytes: int
    host_id: str
    max_model_len: int
    load: WorkerLoad = field(default_factory=WorkerLoad)
    pid: int = 0  # on its own host
    # Processes that share the model's weights and KV heads, this one included
    tensor_parallel: int = 1
    started_by: str = ""  # the controller that owns its process
    term: int = 0  # of that controller's lease when it started the worker
    protocol: Protocol = field(default_factory=Protocol)
    sampled_model_id: str = ""  # as workers of protocol 0 name the same model
    tokenizer_id: str = ""  # hash of the files that define the vocabulary
    vocab_size: int = 0  # 0: the worker does not say

    @property
    def model(self) -> ModelVersion:
        """Of the files that the worker loaded."""
        if self.protocol.version < 1:
            return ModelVersion("", self.model_id)
        return ModelVersion(self.model_id, self.sampled_model_id)


@dataclass(frozen=True, slots=True)
class StandbyWorker:
    """A worker of no pool: its weights are loaded, and it can take a place in either pool within a
    second.
    """

    worker_id: str
    state: Literal["starting", "ready"]  # ready: its engine has run real steps
    host_id: str
    pid: int  # on its own host
    weight_bytes: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class PendingWorker:
    """One that is wanted and that no node has room for."""

    worker_id: str
    pool: Role
    reason: str  # what is missing


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The controllers' lease as Redis has it. `owner` is empty while nobody has taken it."""

    owner: str = ""
    term: int = 0
    beat: int = 0  # renewals in this term


@dataclass(frozen=True, slots=True)
class Claim:
    """What a leading controller shows with each of its writes."""

    owner: str
    term: int


ControllerState = Literal["standby", "claiming", "leading"]


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """A controller's entry in the registry."""

    controller_id: str
    state: ControllerState
    term: int = 0  # of its lease; 0 while it has none


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    unix_time: float
    pool: PoolName
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """A router's entry in the registry. p95 over its last measuring window; None when nothing was
    measured in it.
    """

    router_id: str
    running: int = 0
    waiting: int = 0  # requests that no decode worker has reserved blocks for
    waiting_tokens: int = 0  # prompt tokens of those
    finished: int = 0
    failed: int = 0
    rss_bytes: int = 0
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    certificate_note: str = ""
    protocol: int = 0  # version that it speaks
