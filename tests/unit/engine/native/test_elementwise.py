"""What is done to each value: torch's results, to the bit where arithmetic is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.ops import elementwise, silu

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.sampled_from([0, 1, 2, 3, 7, 16, 17, 33])


@st.composite
def broadcast(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tensors that broadcast to the shape of a third, each with strides of its own."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def tensor(own: list[int], dtype: torch.dtype) -> torch.Tensor:
        step = draw(st.sampled_from([1, 1, 2]))
        order = draw(st.permutations(range(len(own))))
        lying = torch.randn([own[i] * step for i in order], generator=generator).to(dtype)
        every = lying[tuple(slice(None, None, step) for _ in own)]
        return every.permute([order.index(i) for i in range(len(own))])

    a, b = (
        tensor(
            [draw(st.sampled_from([size, size, 1])) for size in shape][
                draw(st.integers(0, len(shape) - 1)) :
            ],
            dtype,
        )
        for dtype in (draw(DTYPES), draw(DTYPES))
    )
    wanted = list(torch.broadcast_shapes(a.shape, b.shape))
    return a, b, tensor(wanted, draw(DTYPES))


@settings(max_examples=150)
@given(broadcast())
def test_sums_and_products(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    a, b, y = tensors
    for operation, torchs in ((Operation.ADD, torch.add), (Operation.MULTIPLY, torch.mul)):
        assert elementwise(operation, y, a, b) is y
        assert torch.equal(y, torchs(a.float(), b.float()).to(y.dtype))


@settings(max_examples=100)
@given(broadcast())
def test_copies_negatives_and_silu(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    a, _, y = tensors
    wide = a.expand(y.shape)
    assert torch.equal(elementwise(Operation.COPY, y, a), wide.to(y.dtype))
    assert torch.equal(elementwise(Operation.NEGATE, y, a), (-wide.float()).to(y.dtype))
    exact = torch.nn.functional.silu(wide.double())
    elementwise(Operation.SILU, y, a)
    torch.testing.assert_close(
        y.double(), exact, rtol=max(1e-6, torch.finfo(y.dtype).eps / 2), atol=1e-30
    )


def test_rounding_is_to_nearest_even_and_keeps_what_is_special() -> None:
    # Ties, and around them
    bits = torch.arange(0x3F800000, 0x3F800000 + 0x30001, 0x1000, dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, torch.nan])
    x = torch.cat((bits.view(torch.float32), -bits.view(torch.float32), special))
    for lying in (x, x[:, None].expand(-1, 20), x[:, None].expand(-1, 20).T):
        y = elementwise(Operation.COPY, torch.empty(lying.shape, dtype=torch.bfloat16), lying)
        wanted = lying.bfloat16()
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(
            y.nan_to_num(0).view(torch.int16), wanted.nan_to_num(0).view(torch.int16)
        )


def test_silu_far_from_zero() -> None:
    x = torch.tensor([-1e4, -200.0, -90.0, -87.0, -30.0, 30.0, 90.0, 1e4, torch.inf, torch.nan])
    y, wanted = silu(x), torch.nn.functional.silu(x.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-30, equal_nan=True)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), columns=st.integers(1, 40), dtype=DTYPES)
@settings(max_examples=30)
def test_a_value_does_not_depend_on_its_place(
    seed: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    y = silu(x)
    for column in range(columns):
        assert torch.equal(silu(x[:, column:]), y[:, column:])
    assert torch.equal(silu(x.T).T, y)
