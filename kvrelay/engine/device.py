"""Small values on their way to the model's device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike


def to_device(values: ArrayLike, dtype: DTypeLike, device: torch.device) -> torch.Tensor:
    """A tensor of the values; on a GPU it is copied in the order of the stream, and nobody waits for it."""
    return torch.from_numpy(np.array(values, dtype=dtype)).to(device, non_blocking=True)
