"""One sequence as a worker sees it: its tokens, how far its KV reaches, and which blocks hold
it.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.types import FinishReason, PrefillTimings, SequenceSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by one scheduler. Invariant: KV of tokens[:num_computed] lies in `blocks`, and
    num_computed < len(tokens): the next step computes at least one token.
    """

    spec: SequenceSpec
    arrived: float  # monotonic seconds
    hasher: BlockHasher
    # Int64, so that a penalty's tensor of them needs no loop
    tokens: array[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache held when the sequence began here
    fetched_tokens: int = 0  # of these, from another worker's prefix cache
    fetch_seconds: float = 0.0
    chunks: int = 0
    started: float | None = None  # when its first chunk was scheduled
    passed_over: float | None = None  # since when steps run without it, though its prompt has begun
    passed_over_s: float = 0.0  # of steps that ran without it
    in_flight: bool = False  # part of the step that runs now
    ended: bool = False  # taken out of the scheduler; blocks go when the step in flight is over

    def __post_init__(self) -> None:
        self.tokens = array("q", self.spec.token_ids)

    @property
    def deadline(self) -> float:
        """Monotonic seconds of this worker's clock; never, if there is none."""
        return math.inf if self.spec.deadline_s is None else self.arrived + self.spec.deadline_s

    @property
    def weight(self) -> float:
        """Of its tenant; 1 for one that is none."""
        return self.spec.weight if 0 < self.spec.weight < math.inf else 1.0

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far, over all attempts."""
        return len(self.tokens) - self.spec.prompt_len

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def timings(self, now: float) -> PrefillTimings:
        assert self.started is not None, "timings exist once the first chunk was scheduled"
        return PrefillTimings(
            self.started - self.arrived + self.passed_over_s,
            now - self.started - self.passed_over_s,
            self.cached_tokens,
            self.chunks,
            self.fetched_tokens,
            self.fetch_seconds,
        )

    def passes(self, now: float) -> None:
        """A step begins without it."""
        if self.started is not None and self.passed_over is None:
            self.passed_over = now

    def runs(self, now: float) -> None:
        """A step begins with it."""
        if self.passed_over is not None:
            self.passed_over_s += now - self.passed_over
            self.passed_over = None

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks to add so that `num_tokens` tokens are covered."""
        return max(0, -(-num_tokens // self.hasher.block_size) - len(self.blocks))

    def take_blocks(self, cache: KvCache, num_tokens: int) -> None:
        """Makes `blocks` cover `num_tokens` tokens. Raises OutOfBlocks and changes nothing if it
        cannot.
        """
        if missing := self.blocks_missing(num_tokens):
            self.blocks += cache.allocate(missing, after=self.blocks[-1] if self.blocks else None)

    def take_prefix(self, cache: KvCache) -> None:
        """Starts from what the prefix cache holds; at least one token is left to compute."""
        assert not self.blocks, "the prefix is taken before any block"
        self.hasher.extend(self.tokens)
        self.blocks = cache.match(self.hasher, len(self.tokens) - 1)
        self.num_computed = len(self.blocks) * self.hasher.block_size

    def advance(self, cache: KvCache, num_tokens: int) -> None:
        """KV of the next `num_tokens` tokens is in the blocks; full blocks become reusable."""
        before = self.num_computed // self.hasher.block_size
        self.num_computed += num_tokens
        full = self.num_computed // self.hasher.block_size
        if full > before:
            self.hasher.extend(self.tokens)
            cache.publish(self.hasher, self.blocks, before, full, self.spec.tenant)

    def append(
        self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Adds a sampled token; returns why the answer ends with it, if it does."""
        self.tokens.append(token_id)
        params = self.spec.sampling
        if self.num_emitted >= params.min_tokens and (
            token_id in params.stop_token_ids
            or (token_id in eos_token_ids and not params.ignore_eos)
        ):
            return "stop"
        if self.num_emitted >= params.max_tokens or len(self.tokens) >= max_model_len:
            return "length"
        return None

    def drop_blocks(self, cache: KvCache) -> None:
        """Gives all blocks back; the KV is gone unless the prefix cache keeps it."""
        cache.release(self.blocks)
        self.blocks = []
        self.num_computed = 0


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of one step: its next `num_tokens` tokens; `sample` when they are its
    last.

    `draft` guesses what follows them. Its blocks are there, and its KV counts where the guess was
    right.
    """

    sequence: Sequence
    num_tokens: int
    sample: bool
    draft: tuple[int, ...] = ()
