from __future__ import annotations

from collections import Counter
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.suffix import KEPT_TOKENS, LONGEST_MATCH, PLACES, SuffixProposer, TextIndex

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)


def common_end(one: list[int], other: list[int]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def naive(texts: list[list[int]], limit: int, ngram: int) -> tuple[int, ...]:
    """By comparing the last text's end with every place of every text."""
    text = texts[-1]
    places = [(other, end) for other in texts for end in range(len(other))]
    lengths = [common_end(text, other[:end]) for other, end in places]
    longest = max(lengths, default=0)
    if longest < ngram:
        return ()
    told = [place for place, length in zip(places, lengths, strict=True) if length == longest]
    draft: list[int] = []
    while len(draft) < min(limit, longest):
        grown = [*text, *draft]
        followers = [
            (grown if other is text else other)[end + len(draft) : end + len(draft) + 1]
            for other, end in told
        ]
        counts = Counter(one[0] for one in followers if one)
        if not counts:
            break
        token = next(
            one[0] for one in reversed(followers) if one and counts[one[0]] == max(counts.values())
        )
        told = [place for place, one in zip(told, followers, strict=True) if one == [token]]
        draft.append(token)
    return tuple(draft)


@given(texts=TEXTS, limit=st.integers(1, 9), ngram=st.integers(1, 3), cut=st.integers(1, 14))
def test_texts_that_grow_are_drafted_for_like_by_a_search_of_all(
    texts: list[list[int]], limit: int, ngram: int, cut: int
) -> None:
    grams = Counter(
        tuple(text[end - ngram : end]) for text in texts for end in range(ngram, len(text))
    )
    index = TextIndex(ngram)
    for text in texts:
        index.add("", text, 0, min(cut, len(text)))
        index.add("", text, min(cut, len(text)), len(text))
    draft = index.propose("", texts[-1], limit)
    if max(grams.values(), default=0) <= PLACES:
        assert draft == naive(texts, limit, ngram)
    else:
        assert len(draft) <= limit
    assert index.propose("another group", texts[-1], limit) == ()


def test_what_most_places_tell_is_drafted() -> None:
    index = TextIndex(2)
    for tail in ([7, 7], [8, 8], [8, 9]):
        text = [1, 2, *tail]
        index.add("", text, 0, len(text))
    assert index.propose("", [1, 2], 4) == (8, 9), "two of three, then the latest"


def test_a_draft_is_as_long_as_its_match_at_most() -> None:
    index = TextIndex(2)
    text = list(range(100))
    index.add("", text, 0, len(text))
    assert index.propose("", [30, 31, 32], 50) == (33, 34, 35)
    assert index.propose("", [*range(60)], 50) == tuple(range(60, 60 + LONGEST_MATCH))


def test_a_repetition_is_repeated_beyond_its_end() -> None:
    index, text = TextIndex(2), [9, 1, 2, 3, 1, 2, 3]
    index.add("", text, 0, len(text))
    assert index.propose("", text, 8) == (1, 2, 3)
    text = [5] * 6
    index.add("x", text, 0, len(text))
    assert index.propose("x", text, 3) == (5, 5, 5)


def test_old_texts_are_forgotten_and_memory_is_bounded() -> None:
    index = TextIndex(2, kept_tokens=100)
    for number in range(50):
        text = [number, number + 1000, number + 2000, number + 3000]
        index.add("", text, 0, len(text))
        assert index.propose("", text[:2], 2) == tuple(text[2:])
    assert index.propose("", [0, 1000], 2) == ()
    assert len(index._young) + len(index._old) <= 100
    assert KEPT_TOKENS < 2**20


class _Text:
    """A sequence as far as the proposer sees it."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.spec = SimpleNamespace(salt="", adapter="")


def test_a_sequence_that_is_preempted_is_indexed_once() -> None:
    proposer: Any = SuffixProposer(2)
    proposer.propose(_Text(1, 2, 3, 4, 5, 1, 2, 3, 9), 4)
    sequence = _Text(7, 1, 2, 8)
    for _ in range(8):
        proposer.propose(sequence, 2)
        proposer.pause(sequence)
    (places,) = [found for key, found in proposer._index._young.items() if key[1] == (1, 2)]
    assert sum(text is sequence.tokens for text, _ in places) == 1
    proposer.forget(sequence)
    proposer.check_integrity(1)
