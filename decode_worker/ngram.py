"""Prompt lookup: what followed the last few tokens when they came before. Pure: no clock, no I/O,
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens; a longer prompt is taken in over several steps, so that it holds up none of them
INDEXED_AT_ONCE = 2048


class NgramProposer:
    """Guesses how one growing sequence goes on (Saxena, Prompt Lookup Decoding, 2023).

    Remembers where each n-gram of min_ngram to max_ngram tokens ended last: some hundred bytes for
    each token and n, little beside the token's KV.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it
        self._indexed = 0  # n-grams that end before this index are known

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow `tokens`, which begin with those of the last call.

        They are what followed the latest occurrence of the longest n-gram that `tokens` end with.
        Where that reaches the end, it goes on with the guess itself: a repetition is repeated.
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

    def _index(self, tokens: Sequence[int]) -> None:
        """Takes in the n-grams that another token follows."""
        end = min(len(tokens), self._indexed + INDEXED_AT_ONCE)
        for index in range(self._indexed, end):
            for length in self._lengths:
                if length <= index:
                    self._next[tuple(tokens[index - length : index])] = index
        self._indexed = end
