"""Whatever a row holds and asks for: a token of the vocabulary or an error, and nothing of it in
another row.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.sampling.categorical import NOT_DRAWN, draw
from kvrelay.engine.sampling.sampler import LEAST_LOGPROB, Sampled, SampleRequest, sample
from kvrelay.engine.sampling.sequence_faults import SequenceFault
from kvrelay.errors import InvalidArgument, KvRelayError
from kvrelay.sampling_limits import LEAST_TEMPERATURE, LIMITS, MAX_BIAS, check_params
from kvrelay.types.requests import SamplingParams

EOS = frozenset({2})
NONSENSE = (math.nan, -math.nan, math.inf, -math.inf)

any_float = st.floats()
any_integer = st.one_of(st.integers(-5, 30), st.integers(-(2**80), 2**80))


def _allowed(name: str) -> st.SearchStrategy[Any]:
    """Both ends, and the whole of what lies between, with what is no number in float32 any more."""
    limit = LIMITS[name]
    if isinstance(limit.least, int):
        return st.one_of(
            st.integers(limit.least, min(int(limit.most), 40)), st.just(int(limit.most))
        )
    ends = [limit.least, limit.most, limit.least + 1e-310]
    return st.one_of(st.sampled_from(ends), st.floats(limit.least, limit.most))


def params(wild: bool, vocab: int) -> st.SearchStrategy[SamplingParams]:
    numbers = {name: _allowed(name) for name in LIMITS if name != "logprobs"}
    bias: st.SearchStrategy[Any] = st.tuples(
        st.integers(0, vocab - 1), st.floats(-MAX_BIAS, MAX_BIAS)
    )
    stops: st.SearchStrategy[Any] = st.integers(0, vocab - 1)
    if wild:
        for name, limit in LIMITS.items():
            numbers[name] = st.one_of(
                _allowed(name), any_integer if isinstance(limit.least, int) else any_float
            )
        bias = st.one_of(bias, st.tuples(any_integer, any_float))
        stops = st.one_of(stops, any_integer)
    return st.builds(
        SamplingParams,
        **numbers
        | {"logprobs": st.one_of(st.none(), numbers.get("logprobs", _allowed("logprobs")))},
        seed=st.one_of(st.none(), any_integer) if wild else st.integers(-(2**80), 2**80),
        stop_token_ids=st.lists(stops, max_size=4).map(tuple),
        logit_bias=st.lists(bias, max_size=4).map(tuple),
    )


@st.composite
def a_row(draw: st.DrawFn, vocab: int, wild: bool) -> tuple[torch.Tensor, SampleRequest]:
    numbers = torch.randn(
        vocab, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    )
    row = numbers * draw(st.sampled_from([0.0, 1e-40, 1.0, 30.0, 1e30, 3e38]))
    if draw(st.booleans()):
        spoilt = draw(st.lists(st.integers(0, vocab - 1), max_size=3))
        row[spoilt] = draw(st.sampled_from(NONSENSE))
    if draw(st.integers(0, 9)) == 0:
        row[:] = draw(st.sampled_from(NONSENSE))
    tokens = draw(st.lists(st.integers(0, vocab - 1), max_size=12))
    length = draw(st.integers(0, len(tokens)))
    return row, SampleRequest(draw(params(wild, vocab)), tokens, length, EOS)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=150)
@given(data=st.data(), vocab=st.sampled_from([3, 24, 90, 1500]), wild=st.booleans())
def test_a_token_of_the_vocabulary_or_an_error_for_its_row_alone(
    data: st.DataObject, vocab: int, wild: bool, dtype: torch.dtype
) -> None:
    rows = data.draw(st.lists(a_row(vocab, wild), min_size=1, max_size=5))
    batch = torch.stack([row for row, _ in rows]).to(dtype)
    requests = [request for _, request in rows]
    before = batch.clone()
    together = sample(batch, requests)
    assert torch.equal(batch.nan_to_num(7.5), before.nan_to_num(7.5)), (
        "the caller's logits stay as they are"
    )
    assert [_plain(one) for one in together] == [
        _plain(sample(batch[row : row + 1], [request])[0]) for row, request in enumerate(requests)
    ]
    for row, request, result in zip(batch.float(), requests, together, strict=True):
        _check(row, request, result)


def _plain(result: Sampled | KvRelayError) -> object:
    return (type(result), str(result)) if isinstance(result, KvRelayError) else result


def _check(row: torch.Tensor, request: SampleRequest, result: Sampled | KvRelayError) -> None:
    finite = bool(row.isfinite().any() and not row.isnan().any() and not row.isposinf().any())
    if _allows(request.params, len(row)):
        assert isinstance(result, Sampled if finite else SequenceFault), (row, request, result)
    else:
        assert isinstance(result, InvalidArgument)
    if isinstance(result, Sampled):
        assert 0 <= result.token_id < len(row)
        if result.logprobs is not None:
            logprobs = [result.logprobs.logprob, *(logprob for _, logprob in result.logprobs.top)]
            assert all(LEAST_LOGPROB <= logprob <= 0 for logprob in logprobs)


def _allows(values: SamplingParams, vocab: int) -> bool:
    found: InvalidArgument | None = None
    try:
        check_params(values, vocab)
    except InvalidArgument as error:
        found = error
    if found is None:
        return True
    assert found.field in SamplingParams.__dataclass_fields__
    # An entry of a mapping is named by its key.
    assert re.match(rf'{found.field}(\["-?\d+"\])? is ', found.message)
    assert "allowed is" in found.message or "allowed are" in found.message
    return False


@settings(max_examples=150)
@given(values=params(wild=True, vocab=24), seed=st.integers(0, 2**32))
def test_a_draw_gives_no_id_beyond_the_vocabulary_whatever_it_is_given(
    values: SamplingParams, seed: int
) -> None:
    """Also without the check of its values that comes before it."""
    integers = {
        name: max(0, min(getattr(values, name) or 0, 40)) for name in ("top_k", "min_tokens")
    }
    drawing = replace(values, **integers, seed=seed)
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(seed))
    for cut in (False, True):
        (token_id,) = draw(logits, [0], [SampleRequest(drawing, [1], 1)], cut).tolist()
        assert token_id == NOT_DRAWN or 0 <= token_id < 24


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-38, LEAST_TEMPERATURE / 2])
def test_temperatures_that_float32_does_not_have_are_greedy(temperature: float) -> None:
    logits = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    requests = [
        SampleRequest(SamplingParams(temperature=temperature, seed=n, top_p=0.9), [1], 1)
        for n in range(40)
    ]
    assert [one.token_id for one in sample(logits, requests)] == logits.argmax(1).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("least", [-math.inf, -3.1e38])
def test_a_token_without_probability_that_all_others_leave_over_has_the_least_logprob(
    least: float,
) -> None:
    logits = torch.tensor([[least, -3e38, 1.2e38]])
    params = SamplingParams(temperature=0.0, min_tokens=9, logit_bias=((1, -100.0),), logprobs=3)
    (result,) = sample(logits, [SampleRequest(params, [1], 1, EOS)])
    assert isinstance(result, Sampled)
    assert result.token_id == 1
    assert result.logprobs is not None
    assert result.logprobs.logprob == LEAST_LOGPROB
    assert sorted(result.logprobs.top) == [(0, LEAST_LOGPROB), (1, LEAST_LOGPROB), (2, 0.0)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nonsense", [math.nan, math.inf])
def test_a_ban_hides_no_nonsense(temperature: float, nonsense: float) -> None:
    """min_tokens puts a number in the place of the end's logit."""
    logits = torch.zeros(1, 24)
    logits[0, 2] = nonsense
    request = SampleRequest(
        SamplingParams(temperature=temperature, seed=1, min_tokens=5), [1], 1, EOS
    )
    (result,) = sample(logits, [request])
    assert isinstance(result, SequenceFault)
