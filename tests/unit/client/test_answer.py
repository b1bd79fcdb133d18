from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_router import LEDGER, last, tokens

from kvrelay.client.answer import Answer
from kvrelay.errors import DataLoss
from kvrelay.types.requests import PromptLogprobs, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateRequest, GenerateResponse


def begun(request: GenerateRequest, now: float = 0.0) -> Answer:
    answer = Answer(request)
    answer.begin(now)
    return answer


def test_a_completion_holds_all_that_came() -> None:
    answer = begun(GenerateRequest(prompt="p"), 10.0)
    first = GenerateResponse("r", 0, (5,), " a", (TokenLogprobs(-0.5),))
    assert answer.receive(first, 10.25)
    assert not answer.finished
    assert answer.receive(last(tokens(1, 6, 7)), 11.0)
    assert answer.finished
    whole = answer.completion(calls=1)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (" a t6 t7", (5, 6, 7), "length")
    assert (whole.ttft_seconds, whole.e2e_seconds, whole.calls) == (0.25, 1.0, 1)
    assert (whole.usage, whole.path, whole.why, whole.ledger) == (
        Usage(7, 2, 3),
        "disaggregated",
        "policy",
        LEDGER,
    )
    assert whole.logprobs == (TokenLogprobs(-0.5),)


def test_an_answer_without_tokens_has_no_ttft() -> None:
    answer = begun(GenerateRequest(prompt="p"))
    answer.receive(last(tokens(0)), 1.0)
    assert answer.completion(1).ttft_seconds is None


def test_the_logprobs_of_a_prompt_of_one_token_are_empty_not_none() -> None:
    answer, none = begun(GenerateRequest(prompt="p")), array("f")
    empty = PromptLogprobs(none, array("i"), none)
    answer.receive(replace(tokens(0, 1), prompt_logprobs=empty), 0.0)
    answer.receive(last(tokens(1, 2)), 0.0)
    assert answer.completion(1).prompt_logprobs == empty


def test_the_next_request_asks_for_the_rest() -> None:
    request = GenerateRequest(prompt="p", resume=(1, 2))
    answer = begun(request)
    assert answer.request() == request
    assert answer.receive(tokens(2, 3, 4), 0.0)
    assert answer.request().resume == (1, 2, 3, 4)


def test_text_without_a_token_is_news() -> None:
    answer = begun(GenerateRequest(prompt="p"))
    answer.receive(tokens(0, 1), 0.0)
    assert answer.receive(GenerateResponse("r", 1, (), " held back"), 0.0)
    assert not answer.receive(GenerateResponse("r", 0, (), " old"), 0.0)
    answer.receive(last(tokens(1)), 0.0)
    assert answer.completion(1).text == " t1 held back"


@given(
    cuts=st.lists(st.integers(0, 20), max_size=6), repeats=st.lists(st.integers(0, 6), max_size=10)
)
def test_repeats_change_nothing(cuts: list[int], repeats: list[int]) -> None:
    bounds = sorted({0, 20, *cuts})
    pieces = [tokens(start, *range(1000 + start, 1000 + end)) for start, end in pairwise(bounds)]
    answer = begun(GenerateRequest(prompt="p"))
    for place, piece in enumerate(pieces):
        assert answer.receive(piece, 0.0)
        for back in repeats:
            assert not answer.receive(pieces[max(0, place - back)], 0.0)
    answer.receive(last(tokens(20)), 0.0)
    whole = answer.completion(1)
    assert whole.token_ids == tuple(range(1000, 1020))
    assert whole.text == "".join(f" t{one}" for one in whole.token_ids)


@pytest.mark.parametrize(
    "response", [tokens(3, 9), tokens(1, 8, 9), last(tokens(3)), last(tokens(0, 1))]
)
def test_a_gap_or_half_a_repeat_is_refused_and_changes_nothing(response: GenerateResponse) -> None:
    answer = begun(GenerateRequest(prompt="p"))
    answer.receive(tokens(0, 1, 2), 0.0)
    with pytest.raises(DataLoss, match="expected token 2"):
        answer.receive(response, 0.0)
    assert not answer.finished
    assert answer.request().resume == (1, 2)


def test_tokens_without_their_logprobs_are_refused() -> None:
    answer = begun(GenerateRequest(prompt="p"))
    response = replace(tokens(0, 1, 2), logprobs=(TokenLogprobs(-0.5),))
    with pytest.raises(DataLoss, match="2 tokens with the logprobs of 1"):
        answer.receive(response, 0.0)
    assert answer.request().resume == ()
