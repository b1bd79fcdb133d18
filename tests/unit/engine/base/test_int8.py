from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.base.int8 import dequantise, quantise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# At least a normal bfloat16 remains of the smallest scale, and no sum of squares is needed for the
# largest.
MAGNITUDES = st.floats(1e-30, 1e30)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """[rows, dim], each row of its own magnitude, some of zeros, some with an outlier."""
    rows, dim = draw(st.integers(1, 6)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(rows, dim, generator=generator)
    for row in values:
        row *= draw(st.just(0.0) | MAGNITUDES)
        row[draw(st.integers(0, dim - 1))] *= draw(st.sampled_from([1.0, -50.0]))
    return values


@given(vectors(), st.sampled_from(DTYPES))
def test_a_round_trip_is_within_half_a_scale(values: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.float16:  # which holds neither the large nor the small
        values = values / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    values = values.to(dtype)
    quantised, scale = quantise(values)
    assert (quantised.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    assert (quantised.shape, scale.shape) == (values.shape, values.shape[:-1])
    assert int(quantised.abs().max()) <= 127
    exact = quantised.double() * scale.double()[..., None]
    half = scale.double()[..., None] / 2
    # Float32 rounds the quotient
    assert ((values.double() - exact).abs() <= half * (1 + 1e-4)).all()
    back = dequantise(quantised, scale, dtype)
    assert back.dtype == dtype
    assert ((back.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()


@given(vectors())
def test_equals_the_definition_value_by_value(values: torch.Tensor) -> None:
    quantised, scale = quantise(values)
    for row, numbers in enumerate(values.numpy()):
        largest = np.float32(max(map(abs, numbers)))
        expected = (
            torch.tensor(largest / np.float32(127)).bfloat16()
            if largest
            else torch.tensor(1.0).bfloat16()
        )
        assert scale[row] == expected
        divisor = np.float32(float(expected))
        naive = [max(-127, min(127, round(float(number / divisor)))) for number in numbers]
        assert quantised[row].tolist() == naive


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-44])
def test_what_no_scale_can_be_given_to_is_zero(tiny: float) -> None:
    quantised, scale = quantise(torch.full((2, 3), tiny))
    assert quantised.tolist() == [[0] * 3] * 2
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_visible(broken: float) -> None:
    values = torch.tensor([[1.0, broken], [1.0, 2.0]])
    back = dequantise(*quantise(values), torch.float32)
    assert back[0].isnan().any()
    torch.testing.assert_close(back[1], values[1], rtol=0, atol=2 / 127)


def test_another_row_changes_nothing() -> None:
    values = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    quantised, scale = quantise(values)
    alone, its_scale = quantise(values[2:3])
    assert torch.equal(quantised[2:3], alone)
    assert torch.equal(scale[2:3], its_scale)
