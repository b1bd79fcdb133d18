"""Drafts for the next step of each sequence. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from decode_worker.ngram import NgramProposer
from kvrelay.config.pools import SpeculationConfig
from kvrelay.worker.sequence import Sequence


class Drafter:
    """Speculation for the sequences of one worker."""

    def __init__(self, config: SpeculationConfig, max_model_len: int) -> None:
        self.max_batch = config.max_batch
        self._config = config
        self._max_model_len = max_model_len
        self._proposers: dict[Sequence, NgramProposer] = {}

    def draft(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """Up to `room` draft tokens, limited so that the drafts and the sampled token after them do
        not exceed the answer's length or the context.
        """
        left = sequence.spec.sampling.max_tokens - sequence.num_emitted
        limit = min(
            self._config.tokens, room, left - 1, self._max_model_len - len(sequence.tokens) - 1
        )
        if limit <= 0:
            return ()
        if sequence not in self._proposers:
            self._proposers[sequence] = NgramProposer(
                self._config.min_ngram, self._config.max_ngram
            )
        return self._proposers[sequence].propose(sequence.tokens, limit)

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of an ended sequence."""
        self._proposers.pop(sequence, None)
