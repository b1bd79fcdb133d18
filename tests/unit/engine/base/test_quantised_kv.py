from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.base.quantised_kv import STORED, dequantise, quantise, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# At least a normal bfloat16 remains of the smallest scale, and no sum of squares is needed for the
# largest.
MAGNITUDES = st.floats(1e-30, 1e30)
LARGEST = {"int8": 127, "int4": 7}
KINDS = st.sampled_from(["int8", "int4"])


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """[rows, dim], each row of its own magnitude, some of zeros, some with an outlier."""
    rows, dim = draw(st.integers(1, 6)), 4 * draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(rows, dim, generator=generator)
    for row in values:
        row *= draw(st.just(0.0) | MAGNITUDES)
        row[draw(st.integers(0, dim - 1))] *= draw(st.sampled_from([1.0, -50.0]))
    return values


def numbers(quantised: torch.Tensor) -> torch.Tensor:
    """The integers, [..., dim], by the description of the format alone."""
    if quantised.dtype is torch.int8:
        return quantised
    dim = 2 * quantised.shape[-1]
    values = torch.empty(*quantised.shape[:-1], dim, dtype=torch.int8)
    for i in range(dim):
        first = i // 32 * 32
        half = min(32, dim - first) // 2
        byte = quantised[..., first // 2 + (i - first) % half]
        values[..., i] = (byte >> 4 if i - first >= half else byte & 15).to(torch.int8) - 8
    return values


@given(vectors(), st.sampled_from(DTYPES), KINDS, st.booleans())
def test_a_round_trip_is_within_half_a_scale(
    values: torch.Tensor, dtype: torch.dtype, kind: str, keys: bool
) -> None:
    if dtype == torch.float16:  # which holds neither the large nor the small
        values = values / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    values = values.to(dtype)
    quantised, scale = quantise(values, STORED[kind], keys=keys)
    assert (quantised.dtype, scale.dtype) == (STORED[kind], torch.bfloat16)
    assert quantised.shape[-1] * (2 if kind == "int4" else 1) == values.shape[-1]
    assert scale.shape == values.shape[:-1]
    assert int(numbers(quantised).abs().max()) <= LARGEST[kind]
    exact = numbers(quantised).double() * scale.double()[..., None]
    rotated = kind == "int4" and keys
    stored = (rotate(values.float()) if rotated else values).double()
    half = scale.double()[..., None] / 2
    # Float32 rounds the quotient, and bfloat16 the scale, of which there may be seven.
    assert ((stored - exact).abs() <= half * (1 + (0.06 if kind == "int4" else 1e-4))).all()
    back = dequantise(quantised, scale, dtype, keys=keys)
    assert back.dtype == dtype
    wanted = rotate(exact.float()).double() if rotated else exact
    most = wanted.abs().amax(-1, keepdim=True)
    assert ((back.double() - wanted).abs() <= torch.finfo(dtype).eps * most).all()


@given(vectors(), KINDS, st.booleans())
def test_equals_the_definition_value_by_value(values: torch.Tensor, kind: str, keys: bool) -> None:
    quantised, scale = quantise(values, STORED[kind], keys=keys)
    most = LARGEST[kind]
    stored = rotate(values) if kind == "int4" and keys else values
    for row, vector in enumerate(stored.numpy()):
        largest = np.float32(max(map(abs, vector)))
        expected = (
            torch.tensor(largest / np.float32(most)).bfloat16()
            if largest
            else torch.tensor(1.0).bfloat16()
        )
        assert scale[row] == expected
        divisor = np.float32(float(expected))
        naive = [max(-most, min(most, round(float(number / divisor)))) for number in vector]
        assert numbers(quantised)[row].tolist() == naive


@pytest.mark.parametrize("dim", [4, 8, 12, 64, 80, 96, 128, 192])
def test_the_rotation_is_a_hadamard_matrix_and_its_own_inverse(dim: int) -> None:
    size = next(2**i for i in range(10, -1, -1) if dim % 2**i == 0)
    signs = torch.tensor(
        [[(-1.0) ** (a & b).bit_count() for a in range(size)] for b in range(size)]
    )
    matrix = torch.block_diag(*[signs / math.sqrt(size)] * (dim // size))
    values = torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(values), values @ matrix)
    torch.testing.assert_close(rotate(rotate(values)), values)


def test_a_large_channel_does_not_hide_the_others() -> None:
    """The reason for the rotation: without it, four bits leave nothing of the small channels."""
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    values[:, [3, 35]] *= 40
    errors = {}
    for keys in (True, False):
        back = dequantise(*quantise(values, torch.uint8, keys=keys), torch.float32, keys=keys)
        small = [channel for channel in range(64) if channel not in (3, 35)]
        errors[keys] = float((back - values)[:, small].norm() / values[:, small].norm())
    # The error of a rotated key is spread evenly: a scale of an eighth of its norm.
    assert errors[True] < 0.75 * errors[False]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-44])
def test_what_no_scale_can_be_given_to_is_zero(tiny: float, kind: str) -> None:
    quantised, scale = quantise(torch.full((2, 4), tiny), STORED[kind], keys=True)
    assert numbers(quantised).tolist() == [[0] * 4] * 2
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_visible(broken: float, kind: str) -> None:
    values = torch.tensor([[1.0, broken, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]])
    back = dequantise(*quantise(values, STORED[kind], keys=True), torch.float32, keys=True)
    assert back[0].isnan().any()
    torch.testing.assert_close(back[1], values[1], rtol=0, atol=2 / LARGEST[kind])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_another_row_changes_nothing(kind: str) -> None:
    values = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    quantised, scale = quantise(values, STORED[kind], keys=True)
    alone, its_scale = quantise(values[2:3], STORED[kind], keys=True)
    assert torch.equal(quantised[2:3], alone)
    assert torch.equal(scale[2:3], its_scale)
