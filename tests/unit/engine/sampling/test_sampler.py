from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.naive_sampling import naive_sample
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrelay.engine.sampling.sampler import SampleRequest, sample
from kvrelay.sampling_limits import LEAST_TEMPERATURE, MAX_LOGPROBS
from kvrelay.types.requests import SamplingParams

VOCAB = 24
PROMPT = [3, 5, 3, 9]
OUTPUT = [7, 3, 7, 11]
EOS = frozenset({2})
DRAWS = 1500


def request(params: SamplingParams, token_ids: list[int] | None = None) -> SampleRequest:
    return SampleRequest(
        params, PROMPT + OUTPUT if token_ids is None else token_ids, len(PROMPT), EOS
    )


def logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def frequencies(row: torch.Tensor, params: SamplingParams, draws: int = DRAWS) -> torch.Tensor:
    """Share of each token in draws with different seeds."""
    requests = [request(replace(params, seed=seed)) for seed in range(draws)]
    counts = Counter(sampled.token_id for sampled in sample(row.expand(draws, -1), requests))
    return torch.tensor([counts[token] / draws for token in range(row.shape[-1])])


def reference(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution, from transformers' own processors where it has them and from the
    definitions where not.
    """
    scores = row.clone()
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    for token in set(OUTPUT):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    processors: list[LogitsProcessor] = [
        MinLengthLogitsProcessor(len(PROMPT) + params.min_tokens, [*EOS, *params.stop_token_ids])
    ]
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(processors)(torch.tensor([PROMPT + OUTPUT]), scores).softmax(-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=3),
        SamplingParams(top_k=VOCAB + 5),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.8, min_p=0.1),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.9),
        SamplingParams(presence_penalty=-1.0, frequency_penalty=-0.5),
        SamplingParams(logit_bias=((4, 3.0), (7, -100.0))),
        SamplingParams(min_tokens=9, stop_token_ids=(7, 3)),
        SamplingParams(min_tokens=4, stop_token_ids=(7, 3)),
    ],
    ids=lambda params: ",".join(
        f"{k}={getattr(params, k)}" for k in params.__slots__ if getattr(params, k)
    ),
)
def test_draws_follow_the_reference_distribution(params: SamplingParams) -> None:
    row = logits(seed=1)
    expected, found = reference(row, params), frequencies(row, params)
    assert found[expected == 0].sum() == 0, "a token was drawn that is excluded"
    # Binomial; the last for rare tokens
    deviation = 4.5 * (expected * (1 - expected) / DRAWS).sqrt() + 2.5 / DRAWS
    assert ((found - expected).abs() <= deviation).all()
    assert sample(row, [request(replace(params, temperature=0))])[0].token_id == int(
        reference(row, replace(params, top_k=1)).argmax()
    )


def test_presence_and_frequency_count_the_output_only() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 9], row[0, 11] = 2.0, 1.9  # 9 is in the prompt, 11 in the output
    assert (
        sample(row, [request(SamplingParams(temperature=0, presence_penalty=1.0))])[0].token_id == 9
    )


ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 70, 1500, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.9, 0.99999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(-(2**63), 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 0, 20]),
    stop_token_ids=st.sampled_from([(), (5, 9, 10**6)]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), vocab=st.sampled_from([VOCAB, 300, 2500]))
def test_a_batch_gives_each_row_what_it_is_given_alone_by_definition(
    data: st.DataObject, seed: int, vocab: int
) -> None:
    rows = data.draw(st.integers(1, 6), label="rows")
    requests = []
    for _ in range(rows):
        token_ids = data.draw(st.lists(st.integers(0, vocab - 1), max_size=40), label="token_ids")
        prompt_len = data.draw(st.integers(0, len(token_ids)), label="prompt_len")
        as_array = data.draw(st.booleans(), label="as array")
        params = data.draw(ANY_PARAMS, label="params")
        requests.append(
            SampleRequest(params, array("q", token_ids) if as_array else token_ids, prompt_len, EOS)
        )
    batch = logits(seed, rows, vocab) * data.draw(st.sampled_from([0.1, 1.0, 3.0]), label="spread")
    before = batch.clone()
    together = sample(batch, requests)
    assert torch.equal(batch, before), "the caller's logits stay as they are"
    assert together == naive_sample(batch, requests)
    assert together == [sample(batch[i : i + 1], requests[i : i + 1])[0] for i in range(rows)]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32), params=ANY_PARAMS.map(lambda params: replace(params, logprobs=None))
)
def test_of_equally_likely_tokens_the_lower_ids_are_kept(seed: int, params: SamplingParams) -> None:
    """In bfloat16 many tokens are equally likely, also at the edge of what top_k and top_p keep."""
    batch = logits(seed, rows=3, vocab=1200).bfloat16()
    requests = [
        SampleRequest(replace(params, seed=row), PROMPT + OUTPUT, len(PROMPT), EOS)
        for row in range(3)
    ]
    assert sample(batch, requests) == naive_sample(batch, requests)
    equal = torch.zeros(1, VOCAB)
    assert {
        sample(equal, [request(SamplingParams(top_k=2, seed=n))])[0].token_id for n in range(40)
    } == {0, 1}


def test_draws_differ_by_seed_and_by_position_and_repeat() -> None:
    row = torch.zeros(1, 1000)

    def draw(seed: int, length: int) -> int:
        return sample(row, [SampleRequest(SamplingParams(seed=seed), [1] * length, 0)])[0].token_id

    by_position = [draw(7, length) for length in range(1, 200)]
    by_seed = [draw(seed, 5) for seed in range(200)]
    assert len(set(by_position)) > 150
    assert len(set(by_seed)) > 150
    assert by_position == [draw(7, length) for length in range(1, 200)]


def test_known_draws() -> None:
    """Fixed for all versions: a sequence resumed on another release goes on as it would have."""
    known = {
        (0, 1): 502,
        (0, 2): 253,
        (7, 1): 82,
        (7, 4096): 910,
        (2**64 - 1, 3): 102,
        (123456789, 10): 60,
    }
    row = torch.zeros(1, 1000)
    for (seed, position), token_id in known.items():
        request = SampleRequest(SamplingParams(seed=seed), [1] * position, 0)
        assert sample(row, [request])[0].token_id == token_id


def test_rounding_errors_hardly_ever_change_a_draw() -> None:
    row = logits(seed=2, vocab=500)
    noise = 1 + 1e-6 * torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    requests = [request(SamplingParams(seed=seed)) for seed in range(2000)]
    exact, noisy = (
        sample(row.expand(2000, -1), requests),
        sample((row * noise).expand(2000, -1), requests),
    )
    assert sum(a != b for a, b in zip(exact, noisy, strict=True)) <= 2


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, LEAST_TEMPERATURE, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    row = logits(seed=4) * 1e30
    sampled = sample(row, [request(SamplingParams(temperature=temperature, seed=1))])[0]
    if temperature < 1:  # with logits of 1e30 nothing else has any weight
        assert sampled.token_id == int(row.argmax())
    assert 0 <= sampled.token_id < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_still_draws_one(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=1, min_tokens=100, stop_token_ids=tuple(range(VOCAB))
    )
    assert 0 <= sample(logits(0), [request(params)])[0].token_id < VOCAB


def test_stop_ids_outside_of_the_vocabulary_ban_nothing() -> None:
    row = logits(0)
    params = SamplingParams(temperature=0, min_tokens=100, stop_token_ids=(VOCAB + 7, -1))
    row[0, VOCAB - 1] = 100
    assert sample(row, [request(params)])[0].token_id == VOCAB - 1


def test_logprobs_are_those_of_the_model() -> None:
    row = logits(5)
    expected = row[0].log_softmax(-1)
    params = SamplingParams(
        temperature=0, logprobs=3, repetition_penalty=5.0, logit_bias=((20, 50.0),)
    )
    sampled = sample(row, [request(params)])[0]
    assert sampled.token_id == 20
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[20]))
    order = expected.argsort(descending=True)[:3].tolist()
    assert [token for token, _ in sampled.logprobs.top] == order
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(expected[order].tolist())


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (MAX_LOGPROBS, MAX_LOGPROBS)])
def test_number_of_top_logprobs(asked: int, given: int) -> None:
    logprobs = sample(logits(5), [request(SamplingParams(temperature=0, logprobs=asked))])[
        0
    ].logprobs
    assert logprobs is not None
    assert len(logprobs.top) == given


def test_half_precision_logits() -> None:
    row = logits(6).to(torch.bfloat16)
    assert sample(row, [request(SamplingParams(temperature=0))])[0].token_id == int(row.argmax())


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_nucleus_of_a_large_vocabulary(top_p: float) -> None:
    """Flat enough that the nucleus is larger than what is sorted at first, and small enough that it
    is not.
    """
    row = logits(7, vocab=5000) * 0.3
    probabilities, tokens = row[0].softmax(-1).sort(descending=True)
    nucleus = set(tokens[: int((probabilities.cumsum(0) < top_p).sum()) + 1].tolist())
    drawn = {
        sampled.token_id
        for sampled in sample(
            row.expand(500, -1),
            [request(SamplingParams(top_p=top_p, seed=seed)) for seed in range(500)],
        )
    }
    assert drawn <= nucleus
    assert len(drawn) > 100
