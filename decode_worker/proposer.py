"""The interface of what drafts tokens: earlier text, or a smaller model."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from kvrelay.worker.sequence import Sequence


def accepted_drafts(tokens: SequenceOf[int], start: int, drafts: SequenceOf[int]) -> int:
    """Returns how many drafts for the tokens from index `start` are right, up to the first that is
    wrong or has no token yet.
    """
    right = 0
    for index, draft in enumerate(drafts, start):
        if index >= len(tokens) or tokens[index] != draft:
            break
        right += 1
    return right


class Proposer(Protocol):
    """Proposes the next tokens of sequences. Lives on the worker's event loop.

    A proposal cannot change an answer, so a proposer may be wrong, and may propose nothing.
    """

    async def prepare(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        """Called before a step is scheduled, with each sequence to draft for and the most tokens
        that it may draft. Sequences may end meanwhile. Must not raise.
        """
        ...

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens, at least 1, that may follow the sequence's tokens."""
        ...

    def pause(self, sequence: Sequence) -> None:
        """Releases the memory of a sequence that was preempted and continues later."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Releases what is kept for a sequence that has ended."""
        ...

    def check_integrity(self, sequences: int) -> None:
        """Raises IntegrityError if more is kept than `sequences` sequences account for."""
        ...
