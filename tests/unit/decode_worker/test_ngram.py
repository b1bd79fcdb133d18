from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.ngram import INDEXED_AT_ONCE, NgramIndex


def naive(tokens: list[int], limit: int, min_ngram: int, max_ngram: int) -> list[int]:
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                grown = list(tokens)
                for index in range(start + length, start + length + limit):
                    grown.append(grown[index])
                return grown[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    first=st.integers(1, 60),
    limit=st.integers(1, 9),
    ngrams=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_a_growing_sequence_is_guessed_like_by_a_search_from_its_end(
    tokens: list[int], first: int, limit: int, ngrams: list[int]
) -> None:
    proposer = NgramIndex(*ngrams)
    for length in range(min(first, len(tokens)), len(tokens) + 1):
        assert proposer.propose(tokens[:length], limit) == tuple(
            naive(tokens[:length], limit, *ngrams)
        )


def test_a_repetition_is_repeated_beyond_its_end() -> None:
    assert NgramIndex(2, 4).propose([9, 1, 2, 3, 1, 2, 3], 8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert NgramIndex(2, 4).propose([5, 5, 5], 3) == (5, 5, 5)


def test_the_longest_match_wins_and_of_these_the_latest() -> None:
    assert NgramIndex(1, 3).propose([1, 2, 3, 7, 3, 8, 1, 2, 3], 1) == (7,)
    assert NgramIndex(1, 1).propose([1, 2, 3, 7, 3, 8, 1, 2, 3], 1) == (8,)


def test_nothing_came_before() -> None:
    assert NgramIndex(2, 4).propose([1, 2, 3, 4], 4) == ()
    assert NgramIndex(2, 4).propose([1], 4) == ()


def test_a_long_prompt_is_taken_in_over_several_calls() -> None:
    prompt = [*range(INDEXED_AT_ONCE + 10), 3, 4]
    proposer = NgramIndex(2, 4)
    assert proposer.propose(prompt, 2) == (5, 6)
    tail = [INDEXED_AT_ONCE + 4, INDEXED_AT_ONCE + 5]
    assert proposer.propose(prompt + tail, 1) == (INDEXED_AT_ONCE + 6,)
