"""Root-mean-square normalisation against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.native.ops import rms_norm

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
COLUMNS = st.integers(1, 70)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
    rows=st.integers(0, 5),
    columns=COLUMNS,
    padding=st.integers(0, 3),
    epsilon=st.sampled_from([1e-6, 1e-2]),
    weight_offset=st.sampled_from([0.0, 1.0]),
    round_before=st.booleans(),
)
def test_equals_the_definition(
    seed: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    padding: int,
    epsilon: float,
    weight_offset: float,
    round_before: bool,
) -> None:
    x = random(seed, rows, columns + padding).to(dtype)[:, :columns]
    weight = random(seed + 1, columns).to(dtype)
    y = rms_norm(x, weight, epsilon, weight_offset=weight_offset, round_before=round_before)
    exact = (
        x.double()
        / (x.double().square().mean(1, keepdim=True) + epsilon).sqrt()
        * (weight.double() + weight_offset)
    )
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps  # two roundings to dtype are within one eps
    torch.testing.assert_close(y.double(), exact, rtol=max(eps, 1e-6), atol=1e-6)


def test_where_it_is_rounded() -> None:
    """The two forms are unlike in the last bit, and each is what torch's operators in that order
    give.
    """
    x, weight = random(0, 200, 64).bfloat16(), random(1, 64).bfloat16()
    normal = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
    before, after = normal.bfloat16() * weight, (normal * weight.float()).bfloat16()
    for wanted, other, round_before in ((before, after, True), (after, before, False)):
        y = rms_norm(x, weight, 1e-6, round_before=round_before)
        wrong, far = (y != wanted).float().mean(), (y != other).float().mean()
        assert wrong < 0.01 < far


@given(seed=st.integers(0, 10**6), dtype=DTYPES, columns=COLUMNS)
@settings(max_examples=20)
def test_shapes_views_and_other_rows_change_nothing(
    seed: int, dtype: torch.dtype, columns: int
) -> None:
    x = random(seed, columns, 3, 4).to(dtype).permute(2, 1, 0)
    weight = random(seed + 1, columns).to(dtype)
    y = rms_norm(x, weight, 1e-6)
    assert y.shape == (4, 3, columns)
    for i in range(4):
        for j in range(3):
            assert torch.equal(rms_norm(x[i, j], weight, 1e-6), y[i, j])


def test_what_is_no_number_stays_in_its_row() -> None:
    x = random(0, 3, 20)
    x[1, 17] = torch.nan
    y = rms_norm(x, torch.ones(20), 1e-6)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
