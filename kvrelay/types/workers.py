"""Values of pools and workers. Frozen, slotted, without I/O."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.protocol_version import Protocol

PoolName = Literal["prefill", "decode"]
# The role of a worker's process: a pool, or standby for either pool.
Role = Literal["prefill", "decode", "standby"]
# See `kvrelay.worker.worker.Worker.state`.
WorkerState = Literal["starting", "ready", "draining", "stuck"]
POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
_FINGERPRINT = re.compile(
    r"fp_([A-Za-z0-9_-]{0,64})\.([A-Za-z0-9_-]{0,64})(?:\.([A-Za-z0-9_-]{1,64}))?"
)


# host: memory outside of the block pool. disk: files. remote: stores that several hosts share.
TierKind = Literal["host", "disk", "remote"]


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One tier of a worker: what it holds, and what it has done since the worker started. Counts
    are in blocks unless they say otherwise.
    """

    kind: str
    # Bytes that the tier may take.
    size_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    # Blocks that came back.
    hits: int = 0
    # Blocks of prompts that neither the pool nor any tier had.
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    # Blocks that were lost because the tier was too slow for them, or failed.
    dropped: int = 0
    errors: int = 0
    # The last error; empty if there was none.
    error: str = ""
    # Bytes per second, as measured; 0 until then.
    read_rate: float = 0.0
    write_rate: float = 0.0
    # Stores of a remote tier that are skipped now, because they failed or did not answer in time.
    skipped: int = 0


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
    # Tokens whose KV sequences dropped.
    dropped_tokens: int = 0
    queue_wait_p95_ms: float = 0.0
    # A notice that the worker's certificate expires soon or has expired.
    certificate_note: str = ""
    # Age of the current step; 0 between steps.
    step_age_s: float = 0.0
    # Utilisation: the share of a prefill worker's time, or of a decode worker's throughput.
    busy_share: float = 0.0
    # Part of blocks_held: blocks for prompts whose KV has not arrived yet.
    blocks_leased: int = 0
    # Rate at which a prompt would be computed now: 0 if the answers of a decode worker leave no
    # time within their ITL, None if unknown.
    prompt_tokens_per_second: float | None = None
    # The tiers behind the block pool, nearest first.
    tiers: tuple[TierLoad, ...] = ()

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
    # Of an answer: hash of the files of its adapter. A worker's version has none.
    adapter: str = ""

    def is_same(self, other: ModelVersion) -> bool:
        """Whether the base models are the same. Compares the full hashes if both have one,
        otherwise the sampled hashes.
        """
        if self.full and other.full:
            return self.full == other.full
        return self.sampled == other.sampled

    @property
    def fingerprint(self) -> str:
        """The fingerprint that clients see. `from_fingerprint` parses it."""
        if not self.full and not self.sampled:
            return ""
        return f"fp_{self.full}.{self.sampled}" + (f".{self.adapter}" if self.adapter else "")

    @classmethod
    def from_fingerprint(cls, text: str) -> ModelVersion:
        """Parses a fingerprint. Raises ValueError for any other text."""
        found = _FINGERPRINT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r:.100} is not the fingerprint of a model")
        return cls(*found.groups(default=""))


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
    # Its kernels and the dtypes of weights and KV, for operators; empty if it does not report them.
    engine: str = ""
    # Hashes of the files of the adapters that it has loaded.
    adapters: tuple[str, ...] = ()
    # Adapters that it could not load: the hash of the files, a space, and the reason.
    refused_adapters: tuple[str, ...] = ()
    # The most tokens of a sequence whose KV of layers with a sliding window it keeps, and the share
    # of these layers in a block's bytes. 0 if it keeps all KV.
    window_tokens: int = 0
    windowed_share: float = 0.0

    @property
    def windows(self) -> str:
        """Identifies the blocks of a worker that may lack the KV of some layers: only workers that
        agree can exchange blocks. Empty if it keeps all KV.
        """
        return self.layout_hash if self.window_tokens else ""

    def counted_tokens(self, num_tokens: int) -> int:
        """The tokens with KV of all layers that take as much memory as a sequence of `num_tokens`
        tokens.
        """
        if num_tokens <= self.window_tokens or not self.window_tokens:
            return num_tokens
        # A worker may report any number.
        share = min(1.0, self.windowed_share)
        return math.ceil(num_tokens * (1 - share) + self.window_tokens * share)

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
class EndedWorker:
    """A worker that has ended lately."""

    worker_id: str
    reason: str
    # Whether the controller ended it after a drain.
    drained: bool
