"""Replaces layers of a transformers model by the native kernels where these give the same
results.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import SiLUActivation

from kvrelay.engine.native import ops
from kvrelay.engine.native.ops import PackedWeight
from kvrelay.engine.native.pages import HugePages


class NativeLinear(nn.Module):
    """Replaces an `nn.Linear`. The weight is stored only in packed tiles."""

    def __init__(self, linear: nn.Linear, memory: HugePages, *, int8: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = PackedWeight.of(linear.weight.detach(), int8=int8, memory=memory)
        self.register_buffer("panels", self.packed.panels, persistent=False)
        self.bias = linear.bias
        self.dtype = linear.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] in the model's dtype, unpacked on each access, for code that reads a weight
        instead of calling the layer.
        """
        return self.packed.unpacked().to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return ops.linear(x, self.packed, self.bias)


class NativeSilu(nn.Module):
    """x · sigmoid(x), which rounds alike at every length; torch rounds differently where a vector
    is not full.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] -> [...], at most 4 dimensions."""
        return ops.silu(x)


class NativeRmsNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 2019) with one weight per value."""

    def __init__(
        self, weight: nn.Parameter, epsilon: float, weight_offset: float, round_before: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon
        self.weight_offset = weight_offset
        self.round_before = round_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]; see `ops.rms_norm`."""
        return ops.rms_norm(
            x,
            self.weight,
            self.epsilon,
            weight_offset=self.weight_offset,
            round_before=self.round_before,
        )


def use_kernels(model: nn.Module, *, int8_weights: bool = False) -> None:
    """Replaces layers in place by native kernels.

    With int8_weights, linear layers have int8 weights if their inputs fill whole packed elements.
    The output head keeps its dtype. A normalisation is replaced if one of the kernel's forms gives
    the result of the model's own code.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    memory = HugePages()
    parents = [module for module in model.modules() if next(module.children(), None) is not None]
    for module in parents:
        for name, child in list(module.named_children()):
            replacement: nn.Module | None
            if type(child) is nn.Linear and PackedWeight.fits(
                child.in_features, child.weight.dtype
            ):
                int8 = (
                    int8_weights
                    and child is not head
                    and PackedWeight.fits(child.in_features, torch.int8)
                )
                replacement = NativeLinear(child, memory, int8=int8)
            elif type(child) in (nn.SiLU, SiLUActivation):
                replacement = NativeSilu()
            elif type(child).__name__.endswith("RMSNorm"):
                replacement = _rms_norm(child)
            else:
                replacement = None
            if replacement is not None:
                setattr(module, name, replacement.eval().requires_grad_(False))


def _rms_norm(module: nn.Module) -> NativeRmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.dtype not in ops.FLOATS:
        return None
    if not isinstance(epsilon, float):
        return None
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    wanted = module(x)
    if (
        not isinstance(wanted, torch.Tensor)
        or wanted.dtype != weight.dtype
        or wanted.shape != x.shape
    ):
        return None
    for weight_offset, round_before in ((0.0, True), (0.0, False), (1.0, False), (1.0, True)):
        candidate = NativeRmsNorm(weight, epsilon, weight_offset, round_before)
        if torch.allclose(candidate(x), wanted, rtol=2 * torch.finfo(weight.dtype).eps, atol=1e-6):
            return candidate
    return None
