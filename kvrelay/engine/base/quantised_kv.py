"""Quantises vectors of KV to int8 or int4, with one scale per vector.

Keys of most models have channels of much larger values than the others (KIVI, Liu et al., 2024,
figure 2). With four bits the small values of such a key would become 0. So int4 keys are stored
rotated, which spreads large values over the channels (QuaRot, Ashkboos et al., 2024, section 4).
"""

from __future__ import annotations

import torch

# The dtype of stored values. A byte of int4 holds two.
STORED = {"int8": torch.int8, "int4": torch.uint8}
_LARGEST = {STORED["int8"]: 127, STORED["int4"]: 7}
# Added to an int4 value, so that its four bits are not negative.
_BIAS = 8
# Values whose int4 form shares bytes: value i is in the low bits of the byte with value i + 16.
PANEL = 32


def quantise(
    values: torch.Tensor, stored: torch.dtype, *, keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., dim] of any float dtype -> int8 [..., dim] or uint8 [..., dim / 2], and bfloat16 scales
    [...].

    scale = max|x| / 127, or / 7 for int4, over the last dim, rounded to bfloat16, and 1 where that
    is 0; q = x / scale, rounded half to even. All is computed in float32, so that every writer of
    the same values writes the same bytes. For int4, dim is a multiple of 4, and x is the rotated
    key.
    """
    values = values.float()
    largest = _LARGEST[stored]
    if stored is torch.uint8 and keys:
        values = rotate(values)
    scale = (values.abs().amax(dim=-1) / largest).bfloat16()
    scale = scale.masked_fill(scale == 0, 1)
    rounded = (values / scale.float()[..., None]).round().clamp(-largest, largest).to(torch.int8)
    return (rounded if stored is torch.int8 else _packed(rounded)), scale


def dequantise(
    quantised: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, keys: bool
) -> torch.Tensor:
    """The inverse of `quantise`, in `dtype`. The error of a value, of a rotated value for int4
    keys, is at most half a scale, plus rounding to `dtype`.
    """
    if quantised.dtype is torch.int8:
        return (quantised.float() * scale.float()[..., None]).to(dtype)
    values = _unpacked(quantised).float() * scale.float()[..., None]
    return (rotate(values) if keys else values).to(dtype)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Multiplies float32 [..., dim] by the normalised Hadamard matrix, which is its own inverse. If
    dim is not a power of two, each part of as many values as the largest one that divides dim.
    """
    *rows, dim = values.shape
    size = dim & -dim
    half = 1
    while half < size:
        a, b = values.reshape(*rows, dim // half // 2, 2, half).unbind(-2)
        values = torch.stack((a + b, a - b), -2)
        half *= 2
    return values.reshape(*rows, dim) * float(size**-0.5)


def _packed(values: torch.Tensor) -> torch.Tensor:
    """int8 [..., dim], -8 to 7 -> uint8 [..., dim / 2]."""
    biased = (values + _BIAS).to(torch.uint8)
    pairs = [part.chunk(2, dim=-1) for part in _panels(biased, PANEL)]
    return torch.cat([(low | high << 4).flatten(-2) for low, high in pairs], -1)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`: int8 [..., dim]."""
    values = [torch.cat((part & 15, part >> 4), -1) for part in _panels(packed, PANEL // 2)]
    return torch.cat([part.flatten(-2) for part in values], -1).to(torch.int8) - _BIAS


def _panels(values: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Views of the last dim: [..., panels, width], and [..., 1, rest] if there is a rest."""
    dim = values.shape[-1]
    whole = dim // width * width
    panels = values[..., :whole].reshape(*values.shape[:-1], whole // width, width)
    parts = panels, values[..., None, whole:]
    return [part for part in parts if all(part.shape[-2:])]
