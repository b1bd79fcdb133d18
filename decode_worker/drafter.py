"""Drafts for the next step of each sequence. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.draft_depth import DraftDepth
from decode_worker.ngram import NgramProposer
from decode_worker.proposer import Proposer, accepted_drafts
from decode_worker.suffix import SuffixProposer
from kvrelay.config.pools import SpeculationConfig
from kvrelay.worker.sequence import Sequence


@dataclass(slots=True)
class _Drafted:
    """The latest draft of a sequence, for the tokens from index `start`."""

    depth: DraftDepth
    start: int
    draft: tuple[int, ...] = ()


class Drafter:
    """Speculation for the sequences of one worker: what is drafted, and how far."""

    def __init__(
        self, config: SpeculationConfig, max_model_len: int, proposer: Proposer | None = None
    ) -> None:
        """proposer: makes the drafts of a `kind` that needs more than the sequence's tokens."""
        self.max_batch = config.max_batch
        self._config = config
        self._max_model_len = max_model_len
        if proposer is None:
            proposer = _of_texts(config)
        self._proposer = proposer
        self._drafted: dict[Sequence, _Drafted] = {}

    async def prepare(self, sequences: Iterable[Sequence]) -> None:
        """Lets the proposer compute drafts for the next step of these sequences."""
        limits = ((one, self._limit(one)) for one in sequences)
        await self._proposer.prepare([(one, limit) for one, limit in limits if limit > 0])

    def draft(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """Up to `room` draft tokens, limited so that the drafts and the sampled token after them do
        not exceed the answer's length or the context.
        """
        limit = min(room, self._limit(sequence))
        draft = self._proposer.propose(sequence, limit) if limit > 0 else ()
        self._drafted[sequence].draft = draft
        return draft

    def pause(self, sequence: Sequence) -> None:
        """Releases the memory of a preempted sequence."""
        self._drafted.pop(sequence, None)
        self._proposer.pause(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drops the state of an ended sequence."""
        self._drafted.pop(sequence, None)
        self._proposer.forget(sequence)

    def check_integrity(self, sequences: int) -> None:
        """Raises IntegrityError if the proposer keeps more than these sequences account for."""
        self._proposer.check_integrity(sequences)

    def _limit(self, sequence: Sequence) -> int:
        """The most draft tokens of the next step; 0 or less for none."""
        if sequence not in self._drafted:
            depth = DraftDepth(self._config.tokens)
            self._drafted[sequence] = _Drafted(depth, len(sequence.tokens))
        drafted = self._drafted[sequence]
        self._learn(drafted, sequence)
        left = sequence.spec.sampling.max_tokens - sequence.num_emitted
        return min(drafted.depth.depth, left - 1, self._max_model_len - len(sequence.tokens) - 1)

    def _learn(self, drafted: _Drafted, sequence: Sequence) -> None:
        """Compares the latest draft with the tokens that came since."""
        end = len(sequence.tokens)
        if end == drafted.start:
            return
        right = accepted_drafts(sequence.tokens, drafted.start, drafted.draft)
        drafted.depth.learn(len(drafted.draft), right)
        drafted.start, drafted.draft = end, ()


def _of_texts(config: SpeculationConfig) -> Proposer:
    """The proposer of a kind that needs the tokens of sequences only."""
    if config.kind == "suffix":
        return SuffixProposer(config.min_ngram)
    assert config.kind == "ngram", f"kind {config.kind} needs its proposer"
    return NgramProposer(config.min_ngram, config.max_ngram)
