"""Selects the prompt tokens that the next step of a prefill worker computes. Pure: no clock, no
I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.tenant_order import TenantTurns


class PrefillScheduler:
    """Chunks under a token budget: by priority, then fairly between tenants, then in order of
    arrival.

    A sequence takes the blocks for its whole prompt before its first chunk, so a started sequence
    always finishes. If the next sequence does not fit, no other sequence starts before it, which
    prevents starvation.
    """

    def __init__(self, cache: KvCache, chunk_tokens: int) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        # In the order in which the sequences of one tenant are served.
        self._sequences: list[Sequence] = []
        self._turns = TenantTurns()

    def __len__(self) -> int:
        """Number of sequences, started or waiting."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, in order of priority and arrival."""
        self._sequences.append(sequence)
        self._sequences.sort(key=lambda one: (one.spec.priority, one.arrived))

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
            num_tokens = self._chunk(sequence, budget)
            if num_tokens == 0:
                break
            budget -= num_tokens
            self._turns.charge(sequence, num_tokens)
            sequence.in_flight = True
            sequence.runs(now)
            sequence.chunks += 1
            batch.append(Work(sequence, num_tokens, sample=num_tokens == sequence.uncomputed))
        for sequence in self._sequences:
            if not sequence.in_flight:
                sequence.passes(now)
        return batch

    def complete(self, batch: list[Work]) -> None:
        """Takes in a finished step. Sequences that were removed during the step release their
        blocks now.
        """
        for work in batch:
            sequence = work.sequence
            sequence.in_flight = False
            if sequence.ended:
                sequence.drop_blocks(self._cache)
            else:
                sequence.advance(self._cache, work.num_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Its blocks are released now, or at the end of the running step."""
        self._sequences.remove(sequence)
        sequence.ended = True
        if not sequence.in_flight:
            sequence.drop_blocks(self._cache)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        if sequence.started is not None:
            return True
        sequence.take_prefix(self._cache)
        try:
            sequence.take_blocks(self._cache, len(sequence.tokens))
        except OutOfBlocks:
            sequence.drop_blocks(self._cache)
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
