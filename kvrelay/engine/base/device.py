"""The device that a model runs on, and copies of small values to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike

from kvrelay.errors import ConfigError


def find_device(name: str) -> torch.device:
    """Parses cpu, cuda or cuda:N. Raises ConfigError for a GPU that torch does not find."""
    device = torch.device(name)
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"{name} is not available: torch {torch.__version__} finds {count} CUDA devices; "
            "use the CPU (num_gpus: 0, --device cpu), or install a GPU driver and a CUDA "
            "build of torch"
        )
    return device


def to_device(values: ArrayLike, dtype: DTypeLike, device: torch.device) -> torch.Tensor:
    """A tensor of the values. The copy to a GPU is asynchronous, in stream order."""
    return torch.from_numpy(np.array(values, dtype=dtype)).to(device, non_blocking=True)
