"""Which layers of a model are replaced, and that they then give the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from kvrelay.engine.model.kernel_modules import NativeGatedLayer, NativeLinear, use_kernels


class Gated(nn.Module):
    def __init__(self, activation: str = "silu", *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 40, bias=bias)
        self.up_proj = nn.Linear(8, 40, bias=bias)
        self.down_proj = nn.Linear(40, 8, bias=bias)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clipped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-0.01, 0.01)


class Swapped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(8, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


@pytest.mark.parametrize(
    ("layer", "replaced"),
    [
        (lambda: Gated(), True),
        (lambda: Gated("swish"), True),
        (lambda: Gated("gelu"), False),
        (lambda: Gated(bias=True), False),
        (lambda: Clipped(), False),
        (lambda: Swapped(), False),
    ],
    ids=["silu", "swish", "gelu", "biased", "clipped", "swapped"],
)
@pytest.mark.parametrize("int8", [False, True])
@torch.inference_mode()
def test_gated_layers(layer: type[nn.Module], replaced: bool, int8: bool) -> None:
    torch.manual_seed(0)
    model = Model(layer()).eval()
    x = torch.randn(2, 5, 8)
    wanted = model(x)
    use_kernels(model, int8_weights=int8)
    assert isinstance(model.layers[0], NativeGatedLayer) == replaced
    assert isinstance(model.head, NativeLinear)
    assert not any(type(module) is nn.Linear for module in model.modules())
    error = (model(x) - wanted).norm() / wanted.norm()
    assert error < (0.02 if int8 else 1e-5)
