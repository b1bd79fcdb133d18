"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens. Pure: no
clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.worker.sequence import Sequence

# Tokens that one call indexes. A longer prompt is indexed over several steps, so that it delays
# none of them.
INDEXED_AT_ONCE = 2048


class NgramIndex:
    """Drafts the continuation of one growing sequence (Saxena, Prompt Lookup Decoding, 2023).

    Remembers the latest end of each n-gram of min_ngram to max_ngram tokens. This takes some
    hundred bytes for each token and n, which is little compared to the token's KV.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        # n-gram -> index of the token that followed it.
        self._next: dict[tuple[int, ...], int] = {}
        # The n-grams that end before this index are known.
        self._indexed = 0

    def propose(self, tokens: SequenceOf[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow `tokens`. Each call must extend the tokens of the
        previous call.

        The draft is the continuation of the latest occurrence of the longest n-gram that `tokens`
        end with. If that reaches the end of `tokens`, the draft continues from its own tokens, so a
        repetition is repeated.
        """
        self._index(tokens)
        draft: list[int] = []
        for length in self._lengths:
            start = self._next.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if start is not None:
                for index in range(start, start + limit):
                    draft.append(
                        tokens[index] if index < len(tokens) else draft[index - len(tokens)]
                    )
                break
        return tuple(draft)

    def _index(self, tokens: SequenceOf[int]) -> None:
        """Indexes the n-grams that another token follows."""
        end = min(len(tokens), self._indexed + INDEXED_AT_ONCE)
        for index in range(self._indexed, end):
            for length in self._lengths:
                if length <= index:
                    self._next[tuple(tokens[index - length : index])] = index
        self._indexed = end


class NgramProposer:
    """Prompt lookup for the sequences of one worker. Its work is done within `propose`."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._indexes: dict[Sequence, NgramIndex] = {}

    async def prepare(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        """Does nothing."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that followed an earlier occurrence of the last tokens."""
        if sequence not in self._indexes:
            self._indexes[sequence] = NgramIndex(self._min_ngram, self._max_ngram)
        return self._indexes[sequence].propose(sequence.tokens, limit)

    def pause(self, sequence: Sequence) -> None:
        """Drops the index of a sequence."""
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drops the index of a sequence."""
        self._indexes.pop(sequence, None)

    def check_integrity(self, sequences: int) -> None:
        """Raises IntegrityError if there are more indexes than sequences."""
        if len(self._indexes) > sequences:
            raise IntegrityError(
                f"{len(self._indexes)} n-gram indexes are kept for {sequences} sequences"
            )
