"""The common base of the schedulers. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.tenant_order import TenantTurns

# Tokens of a scored prompt that one step computes. Each takes memory for the logits of the whole
# vocabulary.
SCORED_TOKENS = 64


class Scheduler(ABC):
    """Chooses the work of the next step and takes in the finished one. Owns its sequences."""

    def __init__(self, cache: KvCache, chunk_tokens: int) -> None:
        """chunk_tokens: the most prompt tokens of one step."""
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._turns = TenantTurns()

    @abstractmethod
    def __len__(self) -> int:
        """Number of sequences, started or waiting."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]: ...

    @abstractmethod
    def next(self, now: float) -> list[Work]:
        """The work of the next step; empty if nothing can run."""

    @abstractmethod
    def ran(self, batch: list[Work], seconds: float, now: float) -> None:
        """Takes in the time that a step took, in seconds, at its end."""

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

    def _budget(self, sequence: Sequence, budget: int) -> int:
        """The part of a step's budget that the sequence may take."""
        if sequence.scores is None:
            return budget
        return min(budget, max(SCORED_TOKENS, self._cache.block_size))

    def _end(self, sequence: Sequence) -> None:
        """Releases the blocks of a removed sequence now, or at the end of the running step."""
        sequence.ended = True
        if not sequence.in_flight:
            sequence.drop_blocks(self._cache)

    def _work(
        self, sequence: Sequence, num_tokens: int, now: float, draft: tuple[int, ...] = ()
    ) -> Work:
        """Puts the next tokens of a sequence into the next step."""
        sequence.in_flight = True
        sequence.runs(now)
        sequence.chunks += 1
        return Work(sequence, num_tokens, num_tokens == sequence.uncomputed, draft)
