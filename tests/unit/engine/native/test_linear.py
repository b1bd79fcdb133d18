"""Linear layers against float64, and, of int8, against integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.native import ops
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.ops import PackedWeight, elementwise, linear, silu

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = st.sampled_from([0, 1, 2, 3, 11, 12, 13, 24, 40, 70])
WORDS = st.sampled_from([16, 32]) | st.integers(1, 40)  # along the input, of two values
OUTPUTS = st.sampled_from([1, 15, 16, 17, 31, 32, 33, 64, 70])


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_apart(x: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values, with others between one row and the next."""
    return torch.cat((x, torch.full((len(x), padding), torch.nan, dtype=x.dtype)), 1)[
        :, : x.shape[1]
    ]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    rows=ROWS,
    words=WORDS,
    outputs=OUTPUTS,
    padding=st.integers(0, 3),
)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_product(
    biased: bool, seed: int, dtype: torch.dtype, rows: int, words: int, outputs: int, padding: int
) -> None:
    x = rows_apart(random(seed, rows, 2 * words).to(dtype), padding)
    weight = random(seed + 1, outputs, 2 * words).to(dtype)
    bias = random(seed + 2, outputs).to(dtype) if biased else None
    y = linear(x, PackedWeight.of(weight), bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == dtype
    # Rounded once; sums are in float32.
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-5)


@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    words=WORDS,
    outputs=OUTPUTS,
    int8=st.booleans(),
)
@settings(max_examples=30)
def test_a_row_does_not_depend_on_the_others(
    seed: int, dtype: torch.dtype, words: int, outputs: int, int8: bool
) -> None:
    x = random(seed, 40, 4 * words).to(dtype)
    weight = PackedWeight.of(random(seed + 1, outputs, 4 * words).to(dtype), int8=int8)
    together = linear(x, weight, None)
    for rows in range(1, 41):
        assert torch.equal(linear(x[40 - rows :], weight, None), together[40 - rows :])


@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    rows=ROWS,
    words=WORDS,
    outputs=OUTPUTS,
    int8=st.booleans(),
)
@settings(max_examples=60)
def test_a_gated_layer_equals_its_parts(
    seed: int, dtype: torch.dtype, rows: int, words: int, outputs: int, int8: bool
) -> None:
    x = random(seed, rows, 4 * words).to(dtype)
    gate, up = (random(seed + i, outputs, 4 * words).to(dtype) for i in (1, 2))
    of_gate, of_up = (linear(x, PackedWeight.of(one, int8=int8), None) for one in (gate, up))
    parts = elementwise(Operation.MULTIPLY, torch.empty_like(of_up), silu(of_gate), of_up)
    assert torch.equal(linear(x, PackedWeight.of_gated(gate, up, int8=int8), None), parts)


@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    shape=st.sampled_from([(2, 3, 8), (1, 5, 8), (8,), (2, 0, 8)]),
)
@settings(max_examples=20)
def test_leading_dimensions_and_transposed_views(
    seed: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = random(seed, *reversed(shape)).to(dtype).permute(*reversed(range(len(shape))))
    weight = PackedWeight.of(random(seed + 1, 5, 8).to(dtype))
    y = linear(x, weight, None)
    assert y.shape == (*shape[:-1], 5)
    assert torch.equal(y.reshape(-1, 5), linear(x.reshape(-1, 8).contiguous(), weight, None))


@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    rows=ROWS,
    words=WORDS,
    outputs=OUTPUTS,
    padding=st.integers(0, 3),
)
@settings(max_examples=60)
def test_int8_is_the_product_of_integers(
    seed: int, dtype: torch.dtype, rows: int, words: int, outputs: int, padding: int
) -> None:
    """Values that are integers times a power of two and reach 127 are quantised without loss."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randint(-127, 128, (count, 4 * words), generator=generator).to(dtype)
        for count in (rows, outputs)
    )
    x[:, 0], weight[:, -1] = 127, -127
    exact = x.double() @ weight.double().T
    powers_x, powers_w = (
        2.0 ** torch.randint(-9, 9, (n,), generator=generator) for n in (rows, outputs)
    )
    x, weight = x * powers_x[:, None].to(dtype), weight * powers_w[:, None].to(dtype)
    y = linear(rows_apart(x, padding), PackedWeight.of(weight, int8=True), None)
    scaled = exact.float() * (powers_x[:, None] * powers_w)
    assert torch.equal(y, scaled.to(dtype))


@given(seed=st.integers(0, 10**6), dtype=DTYPES, rows=ROWS, words=WORDS, outputs=OUTPUTS)
@settings(max_examples=40)
def test_int8_is_near_the_product(
    seed: int, dtype: torch.dtype, rows: int, words: int, outputs: int
) -> None:
    x, bias = random(seed, rows, 4 * words).to(dtype), random(seed + 2, outputs).to(dtype)
    weight = random(seed + 1, outputs, 4 * words).to(dtype)
    y = linear(x, PackedWeight.of(weight, int8=True), bias)
    exact = x.double() @ weight.double().T + bias.double()
    largest = [m.double().abs().amax(1) for m in (x, weight)]
    # Each factor is off by half of its scale at most.
    sums = [m.double().abs().sum(1) for m in (x, weight)]
    bound = (sums[0][:, None] * largest[1] + largest[0][:, None] * sums[1]) / 254
    bound += 4 * words * largest[0][:, None] * largest[1] / 254**2
    assert (
        (y.double() - exact).abs() <= bound * 1.001 + torch.finfo(dtype).eps * exact.abs() + 1e-6
    ).all()


@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    rows=ROWS,
    columns=st.integers(1, 70),
    padding=st.integers(0, 3),
)
@settings(max_examples=40)
def test_rows_are_quantised_to_the_nearest(
    seed: int, dtype: torch.dtype, rows: int, columns: int, padding: int
) -> None:
    x = random(seed, rows, columns) * torch.logspace(-20, 20, rows)[:, None]
    x = rows_apart(x.to(dtype), padding)
    words, scale = ops._quantize(x)
    quantised = words.double() - 128
    torch.testing.assert_close(scale, x.float().abs().amax(1) / 127, rtol=2e-7, atol=0)
    assert (quantised.abs() <= 127).all()
    assert ((x.double() / scale.double()[:, None] - quantised).abs() <= 0.5 + 1e-4).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_and_what_is_no_number(dtype: torch.dtype, int8: bool) -> None:
    """A row of zeros gives the bias; what is no number stays visible in its row, and in no
    other.
    """
    weight, bias = random(0, 40, 24).to(dtype), random(1, 40).to(dtype)
    weight[7] = 0
    packed = PackedWeight.of(weight, int8=int8)
    x = random(2, 6, 24).to(dtype)
    x[1] = 0
    alone = linear(x, packed, bias)
    assert torch.equal(alone[1], bias)
    assert torch.equal(alone[:, 7], bias[7].expand(6))
    for broken in (torch.nan, torch.inf, -torch.inf):
        for column in (0, 23):
            spoilt = x.clone()
            spoilt[3, column] = broken
            y = linear(spoilt, packed, bias)
            assert not y[3].isfinite().any() if int8 else not y[3, :7].isfinite().any()
            assert torch.equal(y[[0, 1, 2, 4, 5]], alone[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_is_what_was_packed(dtype: torch.dtype) -> None:
    weight = random(0, 70, 24).to(dtype)
    assert torch.equal(PackedWeight.of(weight).unpacked(), weight)
    back = PackedWeight.of(weight, int8=True).unpacked()
    assert (
        (back - weight.float()).abs() <= weight.float().abs().amax(1, keepdim=True) / 254 * 1.001
    ).all()


def test_words_must_be_whole() -> None:
    assert [PackedWeight.fits(n, torch.bfloat16) for n in (1, 2, 3, 4)] == [
        False,
        True,
        False,
        True,
    ]
    assert [PackedWeight.fits(n, torch.int8) for n in (2, 4, 6, 8)] == [False, True, False, True]
    assert PackedWeight.fits(1, torch.float32)
    assert not PackedWeight.fits(4, torch.float16)
