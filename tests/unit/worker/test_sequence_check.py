"""Sequences that a worker refuses before they reach a step. The engine checks some of it again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence_check import sequence_flaw

CONTEXT, VOCABULARY = 16, 10


@given(st.lists(st.integers(-2, VOCABULARY + 1), max_size=CONTEXT + 2), st.integers(-1, CONTEXT))
def test_what_a_model_cannot_run_is_refused(token_ids: list[int], prompt_len: int) -> None:
    params = SamplingParams(max_tokens=1, seed=5)
    sequence = SequenceSpec("a", 0, tuple(token_ids), prompt_len, params)
    fits = 0 < len(token_ids) < CONTEXT
    known = all(0 <= one < VOCABULARY for one in token_ids)
    split = 0 < prompt_len <= len(token_ids)
    flaw = sequence_flaw(sequence, CONTEXT, VOCABULARY)
    assert (not flaw) == (fits and known and split), flaw
