"""Replaces layers of a transformers model by the native kernels where these give the same
results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import nn
from transformers.activations import SiLUActivation

from kvrelay.engine.adapters.low_rank import NativeUpdate
from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.native import ops
from kvrelay.engine.native.arguments import Operation
from kvrelay.engine.native.ops import PANEL, PackedWeight
from kvrelay.engine.native.pages import HugePages

SILU = (nn.SiLU, SiLUActivation)


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


@dataclass(frozen=True, slots=True)
class GatedUpdates:
    """What adapters add to the two products of a gated layer."""

    step: StepAdapters
    gate: NativeUpdate
    up: NativeUpdate


class NativeGatedLayer(nn.Module):
    """A feed-forward layer with a gate (SwiGLU, Shazeer 2020): down(silu(gate(x)) · up(x)), where
    one kernel computes all but the last product.
    """

    def __init__(
        self,
        gate: nn.Linear,
        up: nn.Linear,
        down: NativeLinear,
        memory: HugePages,
        *,
        int8: bool,
    ) -> None:
        super().__init__()
        self.packed = PackedWeight.of_gated(
            gate.weight.detach(), up.weight.detach(), int8=int8, memory=memory
        )
        self.register_buffer("panels", self.packed.panels, persistent=False)
        self.down = down
        self.in_features, self.out_features = gate.in_features, gate.out_features
        # Set once adapters are loaded.
        self.updates: GatedUpdates | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., C] -> [..., C]."""
        if self.updates is not None and self.updates.step.active:
            inner = self._with_adapters(x, self.updates)
        else:
            inner = ops.linear(x, self.packed, None)
        return self.down(inner)  # type: ignore[no-any-return]

    def _with_adapters(self, x: torch.Tensor, updates: GatedUpdates) -> torch.Tensor:
        """silu(gate(x)) · up(x) with the rows' adapters. A row without an adapter has the same
        result as without this step's other rows.
        """
        num_panels = -(-self.out_features // PANEL)
        # Panels of the two weights alternate.
        both = ops.linear(
            x, replace(self.packed, outputs=2 * num_panels * PANEL, gated=False), None
        )
        both = both.view(-1, num_panels, 2, PANEL)
        gate, up = both[:, :, 0], both[:, :, 1]
        updates.gate.add_to_panels(x, gate)
        updates.up.add_to_panels(x, up)
        inner = ops.silu(gate)
        ops.elementwise(Operation.MULTIPLY, inner, inner, up)
        return inner.view(*x.shape[:-1], -1)[..., : self.out_features]


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
    The output head keeps its dtype. A normalisation or a gated layer is replaced if the kernel
    gives the result of the model's own code.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    _Replacement(head, int8_weights).within(model)


class _Replacement:
    def __init__(self, head: nn.Module | None, int8_weights: bool) -> None:
        self._head = head
        self._int8_weights = int8_weights
        self._memory = HugePages()

    def within(self, parent: nn.Module) -> None:
        """Replaces the layers of a module, and of the modules in it."""
        for name, child in list(parent.named_children()):
            replacement = self._of(child)
            if replacement is None:
                self.within(child)
            else:
                setattr(parent, name, replacement.eval().requires_grad_(False))

    def _of(self, module: nn.Module) -> nn.Module | None:
        if type(module) is nn.Linear:
            return self._linear(module)
        if type(module) in SILU:
            return NativeSilu()
        if type(module).__name__.endswith("RMSNorm"):
            return _rms_norm(module)
        return self._gated_layer(module)

    def _linear(self, linear: nn.Linear) -> NativeLinear | None:
        if not PackedWeight.fits(linear.in_features, linear.weight.dtype):
            return None
        return NativeLinear(linear, self._memory, int8=self._int8(linear))

    def _gated_layer(self, module: nn.Module) -> NativeGatedLayer | None:
        parts = _parts_of_gated(module)
        if parts is None:
            return None
        gate, up, down = parts
        last = self._linear(down)
        if last is None or not PackedWeight.fits(gate.in_features, gate.weight.dtype):
            return None
        return NativeGatedLayer(gate, up, last, self._memory, int8=self._int8(gate))

    def _int8(self, linear: nn.Linear) -> bool:
        return (
            self._int8_weights
            and linear is not self._head
            and PackedWeight.fits(linear.in_features, torch.int8)
        )


def _parts_of_gated(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """gate, up and down of a module that computes down(silu(gate(x)) · up(x)) without biases; else
    None.
    """
    parts = dict(module.named_children())
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    if not (_is_plain(gate) and _is_plain(up) and _is_plain(down)):
        return None
    x = torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(gate.weight.dtype)
    wanted = module(x)
    if not isinstance(wanted, torch.Tensor):
        return None
    same = torch.equal(wanted, down(nn.functional.silu(gate(x)) * up(x)))
    return (gate, up, down) if same else None


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.bias is None


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
