"""The thinking of an answer ends within its budget, wherever the answer is cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.sampling.sampler import Sampled, SampleRequest, sample
from kvrelay.engine.sampling.thinking import ThinkingBudget, thinking_budget
from kvrelay.types.requests import SamplingParams, ThinkingMarkers
from kvrelay.types.thinking import ThinkingPlace

BEGIN, END, VOCAB = 1, 2, 6
PROMPT = (END, BEGIN, 3)
BUDGETS = st.integers(0, 6)
MARKERS = st.sampled_from([ThinkingMarkers(None, END), ThinkingMarkers(BEGIN, END)])
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=24)


def due(budget: int, markers: ThinkingMarkers, answer: Sequence[int]) -> int | None:
    """The rule in other words, on the whole answer."""
    start = 0
    if markers.begin is not None:
        if markers.begin not in answer[:3]:
            return None
        start = answer.index(markers.begin) + 1
    thought = answer[start:]
    return END if END not in thought and len(thought) >= budget else None


@given(BUDGETS, MARKERS, TOKENS, st.data())
def test_steps_and_drafts_of_any_length_tell_the_same(
    budget: int, markers: ThinkingMarkers, answer: list[int], data: st.DataObject
) -> None:
    state = ThinkingBudget(budget, markers, len(PROMPT))
    tokens = list(PROMPT)
    while len(tokens) - len(PROMPT) < len(answer):
        left = answer[len(tokens) - len(PROMPT) :]
        right = data.draw(st.integers(0, len(left)))
        drafts = [*left[:right], *data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))]
        seen = [*tokens, *drafts]
        found = list(state.next_tokens(seen, len(drafts)))
        for number, one in enumerate(found):
            assert one == due(budget, markers, seen[len(PROMPT) : len(tokens) + number])
        tokens += left[: max(1, right)]


@given(MARKERS, TOKENS)
def test_the_thinking_is_what_stands_between_the_markers(
    markers: ThinkingMarkers, answer: list[int]
) -> None:
    place = ThinkingPlace.at_start(markers)
    for token in answer:
        place = place.after(token, markers)
    thought = answer
    if markers.begin is not None:
        thought = answer[answer.index(BEGIN) + 1 :] if BEGIN in answer[:3] else []
    assert place.thought == (thought.index(END) if END in thought else len(thought))


@given(BUDGETS, MARKERS, TOKENS, st.integers(0, 24))
def test_an_answer_that_continues_elsewhere_tells_the_same(
    budget: int, markers: ThinkingMarkers, answer: list[int], cut: int
) -> None:
    params = SamplingParams(thinking_token_budget=budget, thinking=markers)
    tokens = [*PROMPT, *answer]
    whole, rest = (thinking_budget(params, len(PROMPT)) for _ in range(2))
    assert whole is not None
    assert rest is not None
    list(whole.next_tokens(tokens[: len(PROMPT) + cut]))
    assert list(whole.next_tokens(tokens)) == list(rest.next_tokens(tokens))


@given(BUDGETS, st.integers(0, 99), st.sampled_from([0.0, 1.0]))
def test_a_sampled_answer_thinks_no_longer(budget: int, seed: int, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        logprobs=1,
        thinking_token_budget=budget,
        thinking=ThinkingMarkers(None, END),
    )
    plain = SamplingParams(temperature=temperature, seed=seed)
    state = thinking_budget(params, len(PROMPT))
    tokens = list(PROMPT)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(budget + 4):
        logits = torch.randn(1, VOCAB, generator=draw).expand(2, VOCAB)
        mine, neighbour = sample(
            logits,
            [
                SampleRequest(params, tokens, len(PROMPT), thinking=state),
                SampleRequest(plain, tokens, len(PROMPT)),
            ],
        )
        assert isinstance(mine, Sampled)
        assert isinstance(neighbour, Sampled)
        answer = tokens[len(PROMPT) :]
        ends = END not in answer and len(answer) == budget
        assert mine.token_id == (END if ends else neighbour.token_id)
        assert mine.logprobs is not None
        own = logits[0].log_softmax(0)[mine.token_id].item()
        assert abs(mine.logprobs.logprob - own) < 1e-5
        tokens.append(mine.token_id)
    assert END in tokens[len(PROMPT) : len(PROMPT) + budget + 1]


def test_a_row_without_a_distribution_fails_all_the_same() -> None:
    params = SamplingParams(
        temperature=0.0, thinking_token_budget=0, thinking=ThinkingMarkers(None, END)
    )
    request = SampleRequest(
        params, PROMPT, len(PROMPT), thinking=thinking_budget(params, len(PROMPT))
    )
    logits = torch.full((1, VOCAB), torch.nan)
    (found,) = sample(logits, [request])
    assert isinstance(found, Exception)
