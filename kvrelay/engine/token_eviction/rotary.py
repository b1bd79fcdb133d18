"""The rotary position embedding of a model, as its keys and queries show it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


class Rotary:
    """Turns pairs of a vector's values: value i and value i + turned / 2, of the first `turned`
    values, by the position times a frequency (RoFormer, Su et al., 2021, in the order of Llama).
    """

    def __init__(self, frequencies: torch.Tensor) -> None:
        """frequencies [turned / 2], in radians per position."""
        self._frequencies = frequencies.double()
        self.turned = 2 * len(frequencies)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rotary | None:
        """The embedding that the model names; None if it names none. Whether its vectors are turned
        so must be checked on them.
        """
        found = getattr(model.base_model, "rotary_emb", None)
        frequencies = getattr(found, "inv_freq", None)
        return None if frequencies is None or not frequencies.numel() else cls(frequencies)

    @property
    def frequencies(self) -> torch.Tensor:
        """[turned / 2] float64."""
        return self._frequencies

    def phases(self, positions: torch.Tensor) -> torch.Tensor:
        """e^(i * position * frequency): complex64 [..., turned / 2]."""
        angles = positions.double()[..., None] * self._frequencies
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def pairs(self, vectors: torch.Tensor) -> torch.Tensor:
        """The turned values of float32 [..., dim] as complex64 [..., turned / 2]."""
        real, imaginary = vectors[..., : self.turned].chunk(2, dim=-1)
        return torch.complex(real.contiguous(), imaginary.contiguous())
