"""One sequence on a worker: its tokens, how many have KV, and the blocks that hold the KV."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.engine.sampling.prompt_scores import PromptScores
from kvrelay.engine.sampling.thinking import ThinkingBudget
from kvrelay.types.requests import FinishReason, PrefillTimings, SequenceSpec

if TYPE_CHECKING:
    from kvrelay.engine.token_eviction.recent_queries import RecentQueries


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by one scheduler.

    Invariant: the KV of tokens[:num_computed], without the dropped tokens, is in `blocks`, and
    num_computed < len(tokens). The next step computes at least one token.
    """

    spec: SequenceSpec
    # Monotonic seconds.
    arrived: float
    hasher: BlockHasher
    # The state of the sequence's guidance.
    matcher: Matcher | None = None
    # The state of the sequence's thinking budget.
    thinking: ThinkingBudget | None = None
    # The log-probabilities of the prompt, if they are asked for and still to be sent.
    scores: PromptScores | None = None
    # int64, so that a penalty's tensor of the tokens needs no loop.
    tokens: array[int] = field(init=False)
    blocks: list[int] = field(default_factory=list)
    # The places in `blocks` whose windowed parts are held, if blocks have any.
    window: range = range(0)
    num_computed: int = 0
    # The queries of the tokens before the next eviction, if they are needed.
    queries: RecentQueries | None = None
    # The positions of the tokens with KV, in the order of their rows; None while none is dropped.
    _kept: array[int] | None = None
    # Prompt tokens that the prefix cache held when the sequence began here.
    cached_tokens: int = 0
    # The part of `cached_tokens` that came from another worker's prefix cache, or from a tier.
    fetched_tokens: int = 0
    # The tier that the tokens came from; empty for another worker.
    fetched_from: str = ""
    fetch_seconds: float = 0.0
    chunks: int = 0
    # Time at which the first chunk was scheduled, in monotonic seconds.
    started: float | None = None
    # Time since which steps run without the sequence although its prompt has begun.
    passed_over: float | None = None
    # Seconds of steps that ran without the sequence.
    passed_over_s: float = 0.0
    # True while the running step contains the sequence.
    in_flight: bool = False
    # Removed from the scheduler. The blocks are released when the running step ends.
    ended: bool = False

    def __post_init__(self) -> None:
        self.tokens = array("q", self.spec.token_ids)

    @property
    def deadline(self) -> float:
        """Monotonic seconds of this worker's clock; infinity if there is none."""
        return math.inf if self.spec.deadline_s is None else self.arrived + self.spec.deadline_s

    @property
    def weight(self) -> float:
        """Weight of the sequence's tenant; 1 if the given weight is not positive and finite."""
        return self.spec.weight if 0 < self.spec.weight < math.inf else 1.0

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far, over all attempts."""
        return len(self.tokens) - self.spec.prompt_len

    @property
    def positions(self) -> SequenceOf[int]:
        """The positions of the tokens with KV, in the order of their rows."""
        return range(self.num_computed) if self._kept is None else self._kept

    @property
    def num_stored(self) -> int:
        """Tokens with KV."""
        return len(self.positions)

    @property
    def num_dropped(self) -> int:
        """Tokens whose KV was dropped."""
        return self.num_computed - self.num_stored

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not yet computed."""
        return len(self.tokens) - self.num_computed

    def timings(self, now: float) -> PrefillTimings:
        """Times and counts of the prefill up to `now`. The first chunk must have been scheduled."""
        assert self.started is not None, "timings exist once the first chunk was scheduled"
        return PrefillTimings(
            self.started - self.arrived + self.passed_over_s,
            now - self.started - self.passed_over_s,
            self.cached_tokens,
            self.chunks,
            self.fetched_tokens,
            self.fetch_seconds,
            self.fetched_from,
        )

    def passes(self, now: float) -> None:
        """A step begins without the sequence."""
        if self.started is not None and self.passed_over is None:
            self.passed_over = now

    def runs(self, now: float) -> None:
        """A step begins with the sequence."""
        if self.passed_over is not None:
            self.passed_over_s += now - self.passed_over
            self.passed_over = None

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks to add so that `num_tokens` tokens are covered."""
        stored = num_tokens - self.num_dropped
        return max(0, -(-stored // self.hasher.block_size) - len(self.blocks))

    def units_missing(
        self, cache: KvCache, num_tokens: int, num_computed: int | None = None
    ) -> int:
        """Units of memory that `take_blocks` takes with these arguments, at most."""
        missing, units = self.blocks_missing(num_tokens), cache.pool.units
        if cache.windows is None:
            return missing * units.unwindowed
        computed = self.num_computed if num_computed is None else num_computed
        window = cache.windows.needed(computed, len(self.blocks) + missing)
        more = max(0, len(window) - len(self.window))
        return missing * units.unwindowed + more * units.windowed

    def take_blocks(self, cache: KvCache, num_tokens: int, num_computed: int | None = None) -> None:
        """Makes `blocks` cover `num_tokens` tokens, with the windowed parts that are needed after
        `num_computed` tokens, or after those that have KV. Raises OutOfBlocks and then changes
        nothing.
        """
        missing = self.blocks_missing(num_tokens)
        # Most steps find all blocks there.
        if not missing and cache.windows is None:
            return
        wanted = self.units_missing(cache, num_tokens, num_computed)
        if wanted > cache.pool.units_available:
            raise OutOfBlocks(wanted, cache.pool.units_available)
        if missing:
            self.blocks += cache.allocate(missing, after=self.blocks[-1] if self.blocks else None)
        self._move_window(cache, self.num_computed if num_computed is None else num_computed)

    def _move_window(self, cache: KvCache, num_computed: int) -> None:
        """Holds the windowed parts that are needed after `num_computed` tokens, and no others."""
        if cache.windows is None:
            return
        old, new = self.window, cache.windows.needed(num_computed, len(self.blocks))
        if new == old:
            return
        cache.pool.release_windows(self.blocks[place] for place in old if place not in new)
        cache.pool.hold_windows(self.blocks[place] for place in new if place not in old)
        self.window = new

    def take_prefix(
        self, cache: KvCache, limit: int | None = None, *, receives: bool = False
    ) -> None:
        """Takes the cached prefix's blocks, for at most `limit` tokens. Leaves at least one token
        to compute, and all tokens if the prompt is scored. receives: whether the KV of the other
        tokens will come by hand-off.
        """
        assert not self.blocks, "the prefix is taken before any block"
        if self.scores is not None:
            return
        self.hasher.extend(self.tokens)
        most = len(self.tokens) - 1
        received = len(self.tokens) if receives else 0
        self.blocks = cache.match(
            self.hasher, most if limit is None else min(most, limit), received
        )
        self.window = cache.window_of(self.blocks, received)
        self.num_computed = len(self.blocks) * self.hasher.block_size

    def advance(self, cache: KvCache, num_tokens: int) -> None:
        """Marks the next `num_tokens` tokens as computed. Publishes blocks that are now full, if no
        token was dropped.
        """
        if self._kept is not None:
            self._kept.extend(range(self.num_computed, self.num_computed + num_tokens))
            self.num_computed += num_tokens
            return
        before = self.num_computed // self.hasher.block_size
        self.num_computed += num_tokens
        full = self.num_computed // self.hasher.block_size
        if full > before:
            self.hasher.extend(self.tokens)
            cache.publish(self.hasher, self.blocks, before, full, self.spec.tenant)
        self._move_window(cache, self.num_computed)

    def compacted(self, blocks: list[int], rows: SequenceOf[int]) -> None:
        """Tokens were dropped: the KV of the old rows `rows` is in `blocks`, in this order."""
        positions = self.positions
        self._kept = array("q", [positions[row] for row in rows])
        self.blocks = blocks
        self.queries = None

    def append(
        self, token_id: int, eos_token_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Adds a sampled token; returns the finish reason if the answer ends with it."""
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
        """Releases all blocks. The KV is lost unless the prefix cache keeps it."""
        cache.release(self.blocks, self.window)
        self.blocks = []
        self.window = range(0)
        self.num_computed = 0
        self.queries = self._kept = None


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of one step: its next `num_tokens` tokens. `sample` is true if they are
    its last.

    `draft` holds draft tokens that follow. Their blocks are allocated, and the KV of accepted
    drafts is kept.
    """

    sequence: Sequence
    num_tokens: int
    sample: bool
    draft: tuple[int, ...] = ()
