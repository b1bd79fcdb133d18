"""Quantises vectors of KV to int8, with one scale per vector."""

from __future__ import annotations

import torch

LARGEST = 127


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., dim] of any float dtype -> int8 [..., dim] and bfloat16 scales [...].

    scale = max|x| / 127 over the last dim, rounded to bfloat16, and 1 where that is 0; q = x /
    scale, rounded half to even. Both are computed in float32, so that every writer of the same
    values writes the same bytes.
    """
    values = values.float()
    scale = (values.abs().amax(dim=-1) / LARGEST).bfloat16()
    scale = scale.masked_fill(scale == 0, 1)
    rounded = (values / scale.float()[..., None]).round().clamp(-LARGEST, LARGEST)
    return rounded.to(torch.int8), scale


def dequantise(quantised: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `quantise`, in `dtype`. The error is at most half a scale, plus rounding to
    `dtype`.
    """
    return (quantised.float() * scale.float()[..., None]).to(dtype)
