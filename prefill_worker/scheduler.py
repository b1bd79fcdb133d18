"""Selects the prompt tokens that the next step of a prefill worker computes. Pure: no clock, no
I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.worker.scheduler import Scheduler
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.steps.prompt_rate import PromptRate


class PrefillScheduler(Scheduler):
    """Chunks under a token budget: by priority, then fairly between tenants, then in order of
    arrival.

    A sequence takes the blocks for its whole prompt before its first chunk, so a started sequence
    always finishes. If the next sequence does not fit, no other sequence starts before it, which
    prevents starvation.
    """

    def __init__(self, cache: KvCache, chunk_tokens: int) -> None:
        super().__init__(cache, chunk_tokens)
        # In the order in which the sequences of one tenant are served.
        self._sequences: list[Sequence] = []
        # The sequence that found no room, with the blocks at that time.
        self._no_room: tuple[Sequence, int, int] | None = None
        self.prompt_rate = PromptRate(chunk_tokens // 4)

    def __len__(self) -> int:
        """Number of sequences, started or waiting."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, in order of priority and arrival."""
        self._sequences.append(sequence)
        self._sequences.sort(key=lambda sequence: (sequence.spec.priority, sequence.arrived))

    def next(self, now: float) -> list[Work]:
        """The next step's work; empty if there is none, or if the first sequence waits for
        blocks.
        """
        batch: list[Work] = []
        budget = self._chunk_tokens
        may_start = True
        for sequence in self._turns.order(self._sequences):
            if budget == 0:
                break
            if sequence.started is None:
                # Later sequences that have started continue: the waiting sequence needs their
                # blocks.
                may_start = may_start and self._admit(sequence, now)
                if not may_start:
                    continue
            num_tokens = self._chunk(sequence, self._budget(sequence, budget))
            if num_tokens == 0:
                break
            budget -= num_tokens
            self._turns.charge(sequence, num_tokens)
            batch.append(self._work(sequence, num_tokens, now))
        for sequence in self._sequences:
            if not sequence.in_flight:
                sequence.passes(now)
        return batch

    def ran(self, batch: list[Work], seconds: float, now: float) -> None:
        """Measures the rate."""
        self.prompt_rate.add(sum(work.num_tokens for work in batch), seconds, now)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Its blocks are released now, or at the end of the running step."""
        self._sequences.remove(sequence)
        self._end(sequence)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        pool = self._cache.pool
        state = sequence, pool.units_available, pool.num_contents
        # The search for a cached prefix takes long, so it is not repeated in vain.
        if state == self._no_room:
            return False
        sequence.take_prefix(self._cache)
        try:
            sequence.take_blocks(self._cache, len(sequence.tokens))
        except OutOfBlocks:
            sequence.drop_blocks(self._cache)
            self._no_room = state
            return False
        sequence.cached_tokens = sequence.num_computed
        sequence.started = now
        return True

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens to compute now. A chunk that is not the last ends with a full block, which can be
        sent at once.
        """
        if sequence.uncomputed <= budget:
            return sequence.uncomputed
        size = sequence.hasher.block_size
        end = (sequence.num_computed + budget) // size * size
        return max(end - sequence.num_computed, 0)
