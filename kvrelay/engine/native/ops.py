"""The kernels as functions of tensors on the CPU, in float32 or bfloat16."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvrelay.compiler.compiled import NativeUnavailable
from kvrelay.engine.native import arguments as args
from kvrelay.engine.native.arguments import DTYPES, Operation
from kvrelay.engine.native.build import library
from kvrelay.engine.native.pages import HugePages
from kvrelay.engine.native.program import call, call_rows, empty, once

FLOATS = (torch.float32, torch.bfloat16)
# Columns.
PANEL = 32


def set_threads(count: int) -> None:
    """Sets how many threads a kernel may use, for the whole process."""
    library().kvrelay_set_threads(ctypes.c_int64(count))


def check() -> None:
    """Multiplies in each number format, with few rows and with many. Raises NativeUnavailable if a
    product is wrong.

    The check finds processors on which the kernels do not work, before a worker serves on them.
    """
    random = torch.Generator().manual_seed(0)
    for dtype, int8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        x, weight = (torch.randn(40, 64, generator=random).to(dtype) for _ in "xw")
        wanted = x.float() @ weight.float().T
        packed = PackedWeight.of(weight, int8=int8)
        for rows in (1, 7, 40):
            error = (linear(x[:rows], packed, None).float() - wanted[:rows]).norm() / wanted[
                :rows
            ].norm()
            if not error < 0.03:
                raise NativeUnavailable(
                    f"the kernels compute wrong matrix products on this processor, {error:.1%} off"
                )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """The weight of a linear layer in packed tiles of 32 outputs: [outputs / 32][packed elements
    along the input][32], each packed element of 4 bytes.

    An int8 weight has one scale per output: max |w| / 127 of its row.
    """

    panels: torch.Tensor
    inputs: int
    outputs: int
    # [outputs, padded] float32.
    scale: torch.Tensor | None = None
    # [outputs, padded] int32: 128 · Σ w, since the kernel shifts x by 128.
    zero_sum: torch.Tensor | None = None
    # Holds two weights, and every other panel is of the second.
    gated: bool = False

    @staticmethod
    def fits(inputs: int, dtype: torch.dtype) -> bool:
        """True if a weight of `inputs` columns in `dtype` fills whole packed elements."""
        return dtype in DTYPES and inputs * dtype.itemsize % 4 == 0

    @classmethod
    def of(
        cls, weight: torch.Tensor, *, int8: bool = False, memory: HugePages | None = None
    ) -> PackedWeight:
        """Packs weight [outputs, inputs], float32 or bfloat16. `inputs` values must fill whole
        packed elements.
        """
        outputs, inputs = weight.shape
        padded = (outputs + PANEL - 1) // PANEL * PANEL
        scale = zero_sum = None
        if int8:
            weight = weight.float()
            largest = weight.abs().amax(1)
            scale = torch.ones(padded)
            scale[:outputs] = torch.where(largest > 0, largest / 127, 1.0)
            weight = (weight / scale[:outputs, None]).round().clamp(-127, 127).to(torch.int8)
            zero_sum = torch.zeros(padded, dtype=torch.int32)
            zero_sum[:outputs] = 128 * weight.sum(1, dtype=torch.int32)
        per_word = 4 // weight.dtype.itemsize
        rows = weight.new_zeros(padded, inputs)
        rows[:outputs] = weight
        words = rows.view(padded // PANEL, PANEL, inputs // per_word, per_word).permute(0, 2, 1, 3)
        panels = (memory or HugePages()).empty(tuple(words.shape), words.dtype)
        return cls(panels.copy_(words), inputs, outputs, scale, zero_sum)

    @classmethod
    def of_gated(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        *,
        int8: bool = False,
        memory: HugePages | None = None,
    ) -> PackedWeight:
        """Packs two weights [outputs, inputs], as `of` does. Then `linear` computes silu(x gateᵀ) ·
        x upᵀ.
        """
        padding = (0, 0, 0, -len(gate) % PANEL)
        panels = [F.pad(weight, padding).reshape(-1, PANEL, gate.shape[1]) for weight in (gate, up)]
        both = cls.of(torch.stack(panels, 1).flatten(0, 2), int8=int8, memory=memory)
        return replace(both, outputs=len(gate), gated=True)

    def unpacked(self) -> torch.Tensor:
        """[outputs, inputs]; float32 for an int8 weight. Not for gated weights."""
        assert not self.gated
        rows = self.panels.permute(0, 2, 1, 3).reshape(-1, self.inputs)[: self.outputs]
        return rows if self.scale is None else rows.float() * self.scale[: self.outputs, None]


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., inputs] -> [..., outputs]: x Wᵀ + b, rounded once. Sums are in float32, and exact for
    int8 weights. With a gated weight, rounded where separate operators round.
    """
    assert weight.scale is not None or x.dtype == weight.panels.dtype, (
        "the kernel reads both as one type"
    )
    rows = as_rows(x)
    y = empty((*x.shape[:-1], weight.outputs), x.dtype)
    arguments = args.LinearCall(
        weight=weight.panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        rows=rows.shape[0],
        inputs=weight.inputs,
        outputs=weight.outputs,
        weight_dtype=DTYPES[weight.panels.dtype],
        y_dtype=DTYPES[x.dtype],
        gated=weight.gated,
    )
    if weight.scale is not None and weight.zero_sum is not None:
        rows, scale = once(_quantize, rows)
        arguments.x_scale = scale.data_ptr()
        arguments.weight_scale = weight.scale.data_ptr()
        arguments.zero_sum = weight.zero_sum.data_ptr()
    # Rows must begin at packed elements of 4 bytes.
    elif rows.stride(0) * rows.itemsize % 4:
        rows = rows.contiguous()
    arguments.x = rows.data_ptr()
    arguments.x_stride = rows.stride(0)
    call("kvrelay_linear", arguments)
    return y


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [R, C] -> uint8 [R, C], round(x / scale) + 128, and scale [R] float32: max |x| / 127 of
    each row.
    """
    scale = empty((rows.shape[0],), torch.float32)
    y = empty((rows.shape[0], rows.shape[1]), torch.uint8)
    call_rows(
        "kvrelay_quantize",
        args.QuantizeCall(
            x=rows.data_ptr(),
            y=y.data_ptr(),
            scale=scale.data_ptr(),
            columns=rows.shape[1],
            x_stride=rows.stride(0),
            x_dtype=DTYPES[rows.dtype],
        ),
        reads=[rows],
        writes=[y, scale[:, None]],
    )
    return y, scale


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    weight_offset: float = 0.0,
    round_before: bool = True,
) -> torch.Tensor:
    """x [..., C], weight [C] -> x / sqrt(mean x² + epsilon) · (weight + weight_offset), in float32.

    With round_before, the normalised x is rounded to its dtype before it is multiplied by the
    weight.
    """
    assert x.dtype == weight.dtype, "the kernel reads both as one type"
    rows = as_rows(x)
    y = empty(tuple(x.shape), x.dtype)
    call_rows(
        "kvrelay_rms_norm",
        args.RmsNormCall(
            x=rows.data_ptr(),
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            columns=rows.shape[1],
            x_stride=rows.stride(0),
            dtype=DTYPES[x.dtype],
            epsilon=epsilon,
            weight_offset=weight_offset,
            round_before=round_before,
        ),
        reads=[rows, weight.expand(rows.shape)],
        writes=[y.view(rows.shape)],
    )
    return y


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows are contiguous; a view if possible."""
    if x.dim() == 3 and x.shape[0] == 1:
        x = x[0]
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x); x has at most 4 dimensions."""
    return elementwise(Operation.SILU, empty(tuple(x.shape), x.dtype), x)


def elementwise(
    operation: Operation, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None = None
) -> torch.Tensor:
    """y = operation(a, b) in float32; a and b broadcast to y, which has at most 4 dimensions.
    Returns y.
    """
    reads = [a.expand(y.shape)] if b is None else [a.expand(y.shape), b.expand(y.shape)]
    call_rows(
        "kvrelay_elementwise",
        args.ElementwiseCall(
            a=a.data_ptr(),
            b=None if b is None else b.data_ptr(),
            y=y.data_ptr(),
            operation=operation,
            a_dtype=DTYPES[a.dtype],
            b_dtype=DTYPES[a.dtype if b is None else b.dtype],
            y_dtype=DTYPES[y.dtype],
            size=_four(tuple(y.shape), 1),
            a_stride=_four(reads[0].stride(), 0),
            b_stride=_four(reads[-1].stride(), 0),
            y_stride=_four(y.stride(), 0),
        ),
        reads=reads,
        writes=[y],
    )
    return y


def _four(values: tuple[int, ...], filler: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 4)(*[filler] * (4 - len(values)), *values)
