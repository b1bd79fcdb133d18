"""Suffix decoding: drafts what followed the last tokens earlier, in this answer or another. Pure:
no clock, no I/O, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from decode_worker.ngram import INDEXED_AT_ONCE
from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.worker.sequence import Sequence

# Tokens that are compared; a longer match promises no more.
LONGEST_MATCH = 32
# Places that are kept for an n-gram, the latest ones.
PLACES = 8
# Tokens whose places are kept, of all texts. Each takes up to 400 bytes.
KEPT_TOKENS = 2**17

Place = tuple[SequenceOf[int], int]
"""A text, and the index of a token in it that followed an n-gram."""


class TextIndex:
    """Where n-grams occurred in prompts and answers of this worker.

    Texts are found by the n-grams of `ngram` tokens. The places are in two generations. When the
    younger one has half of the tokens, it takes the place of the older one, which is forgotten.
    """

    def __init__(self, ngram: int, kept_tokens: int = KEPT_TOKENS) -> None:
        self._ngram = ngram
        self._most = kept_tokens // 2
        # (group, n-gram) -> places, the latest last.
        self._young: dict[tuple[object, tuple[int, ...]], list[Place]] = {}
        self._old: dict[tuple[object, tuple[int, ...]], list[Place]] = {}
        self._tokens = 0

    def add(self, group: object, text: SequenceOf[int], start: int, end: int) -> None:
        """Adds the tokens from index `start` to `end`, which must exist, as followers of the
        n-grams before them.
        """
        for index in range(max(start, self._ngram), end):
            key = group, tuple(text[index - self._ngram : index])
            places = self._young.setdefault(key, [])
            places.append((text, index))
            if len(places) > PLACES:
                del places[0]
        self._tokens += end - start
        if self._tokens >= self._most:
            self._old, self._young, self._tokens = self._young, {}, 0

    def propose(self, group: object, text: SequenceOf[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow the text, and at most as many as the longest match
        has.

        Of the places with the longest match, each tells what followed it. The draft is, token by
        token, what most of them tell; of equal counts, what the latest tells. A place in the text
        itself goes on with the draft, so a repetition is repeated.
        """
        key = group, tuple(text[-self._ngram :])
        places = [*self._old.get(key, ()), *self._young.get(key, ())]
        lengths = [_match(text, place) for place in places]
        longest = max(lengths, default=0)
        told = [one for one, length in zip(places, lengths, strict=True) if length == longest]
        draft: list[int] = []
        while told and len(draft) < min(limit, longest):
            following = [_follower(text, draft, place) for place in told]
            counts = Counter(one for one in reversed(following) if one is not None)
            if not counts:
                break
            # The first of equal counts, which is the latest place's.
            token = max(counts, key=counts.__getitem__)
            told = [one for one, next_ in zip(told, following, strict=True) if next_ == token]
            draft.append(token)
        return tuple(draft)


def _match(text: SequenceOf[int], place: Place) -> int:
    """Tokens at the end of `text` that equal those before the place, at most LONGEST_MATCH."""
    other, end = place
    most = min(LONGEST_MATCH, end, len(text))
    for length in range(most):
        if other[end - 1 - length] != text[-1 - length]:
            return length
    return most


def _follower(text: SequenceOf[int], draft: list[int], place: Place) -> int | None:
    """The token that follows at the place after the draft, or None if its text ends before."""
    other, start = place
    index = start + len(draft)
    if index < len(other):
        return other[index]
    return draft[index - len(text)] if other is text else None


class SuffixProposer:
    """Suffix decoding over all sequences of one worker (Oliaro et al., SuffixDecoding, 2024).

    Sequences learn from each other if they may share cached KV: those of one tenant, cache salt and
    adapter. Its work is done within `propose`.
    """

    def __init__(self, ngram: int) -> None:
        self._index = TextIndex(ngram)
        # The tokens before this index are in the index of texts.
        self._indexed: dict[Sequence, int] = {}

    async def prepare(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        """Does nothing."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that followed the last tokens in this or another sequence."""
        self._add(sequence)
        return self._index.propose(_group(sequence), sequence.tokens, limit)

    def pause(self, sequence: Sequence) -> None:
        """Keeps how far the sequence is indexed, so that its text is not added twice."""

    def forget(self, sequence: Sequence) -> None:
        """Stops following a sequence. Its text stays in the index of texts."""
        if sequence in self._indexed:
            self._add(sequence)
            del self._indexed[sequence]

    def check_integrity(self, sequences: int) -> None:
        """Raises IntegrityError if more sequences are followed than there are."""
        if len(self._indexed) > sequences:
            raise IntegrityError(f"{len(self._indexed)} of {sequences} sequences are followed")

    def _add(self, sequence: Sequence) -> None:
        """Adds the next tokens of the sequence to the index of texts."""
        start = self._indexed.get(sequence, 0)
        end = min(len(sequence.tokens), start + INDEXED_AT_ONCE)
        self._index.add(_group(sequence), sequence.tokens, start, end)
        self._indexed[sequence] = end


def _group(sequence: Sequence) -> tuple[str, str]:
    return sequence.spec.salt, sequence.spec.adapter
