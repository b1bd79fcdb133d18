"""When a sequence drops tokens of its KV. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

import sys

from kvrelay.worker.sequence import Sequence

# Part of the budget that an eviction frees.
_FREED = 1 / 8


class TokenBudget:
    """Limits the tokens of a decoding sequence that have KV.

    A prompt is computed whole; tokens are dropped from the first token of the answer on. When a
    sequence evicts depends on nothing but its own tokens. So a sequence that is computed again,
    here or on another worker, evicts at the same places and keeps the same tokens, if its steps end
    where `step_end` says.
    """

    def __init__(self, tokens: int, block_size: int, window: int) -> None:
        """tokens: the budget. window: tokens before an eviction whose queries are needed."""
        self._tokens = tokens
        self._block_size = block_size
        self._window = window
        freed = max(int(tokens * _FREED) // block_size, 1, -(-window // block_size))
        self._kept = tokens - freed * block_size

    def full_at(self, sequence: Sequence) -> int:
        """The number of tokens with KV at which the sequence evicts."""
        if sequence.num_dropped:
            return self._tokens
        return max(self._tokens, sequence.spec.prompt_len + self._window)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether the sequence must evict before its next step, and sits out steps until then."""
        if sequence.num_stored < self.full_at(sequence):
            return False
        queries = sequence.queries
        return not self._window or (queries is not None and sequence.num_computed > queries.last)

    def blocks_over(self, sequence: Sequence) -> int:
        """The blocks that an eviction gives back."""
        return -(-(sequence.num_stored - self._kept) // self._block_size)

    def needs_queries(self, sequence: Sequence) -> bool:
        """Whether the next tokens are the last before an eviction, and their queries are needed."""
        return bool(self._window) and sequence.num_stored >= self.full_at(sequence) - self._window

    def step_end(self, sequence: Sequence) -> int:
        """The position after the last token that the next step may compute."""
        full = self.full_at(sequence) + sequence.num_dropped
        ends = sequence.spec.prompt_len, full - self._window, full
        # Only a sequence whose KV came from elsewhere can be beyond all of them.
        return min((end for end in ends if end > sequence.num_computed), default=sys.maxsize)

    def most_drafts(self, sequence: Sequence) -> int:
        """The most draft tokens that the next step may verify."""
        if self.needs_queries(sequence):
            return 0
        return self.step_end(sequence) - sequence.num_computed - 1

    def cacheable(self, sequence: Sequence) -> int:
        """The tokens of a new sequence whose KV may come from the prefix cache. Later tokens were
        computed without those that are dropped, or their queries are needed.
        """
        return self.full_at(sequence) - self._window - 1

    def held(self, sequence: Sequence) -> int:
        """The tokens that the sequence's blocks must cover before it evicts, or all it has."""
        full = self.full_at(sequence) + sequence.num_dropped
        # A sequence whose KV came from elsewhere may evict later, since it lacks the queries.
        is_late = sequence.num_computed >= full
        return len(sequence.tokens) if is_late else min(len(sequence.tokens), full)
