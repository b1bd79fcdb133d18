"""The KV cache of a model: bytes per token and per sequence, with the formula. Pure.

Source of the formula: Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 2.1;
grouped heads: Ainslie et al., "GQA" (2023), section 2.2; latent attention: DeepSeek-V2 (2024),
section 2.1.4 and table 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvrelay.models.model_shape import LayerShape, ModelShape
from kvrelay.types.kv_layout import ROUND, LayerKv

# native: as kvrelay's engine keeps it: K and V of all heads and all tokens, on a CPU only those of
# the windows; of latent attention each latent vector once, or K and V if devices share the layers.
# compact: the least that the architecture needs: each latent vector once on each device, and only
# the tokens of the windows, as vLLM keeps.
KvForm = Literal["native", "compact"]
# Bytes of one value.
KV_DTYPES = {"float32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
# Bytes of the scale of each token's vector in each head (`kvrelay.types.kv_layout`).
_SCALED = {"int8": 2.0, "int4": 2.0}


# Without slots, since the sums over the layers are computed once.
@dataclass(frozen=True)
class KvSize:
    """The KV cache of a model in one dtype and form."""

    shape: ModelShape
    dtype: str
    form: KvForm
    # Devices that share the layers (tensor parallelism). Each keeps whole KV heads and whole latent
    # vectors, so devices beyond the number of KV heads keep copies: Pope et al., section 3.3.
    degree: int = 1
    # Tokens of a sequence that have KV, of the native engine's `kv.eviction`; 0 keeps all.
    budget_tokens: int = 0
    # Whether the device is a CPU.
    is_cpu: bool = False

    def on(self, degree: int) -> KvSize:
        """Returns the KV of all of `degree` devices together, copies included."""
        return replace(self, degree=degree)

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers, within every window."""
        return sum(self._layer_bytes(layer) for layer in self.shape.layers)

    @cached_property
    def bytes_per_old_token(self) -> float:
        """Bytes of one token that all windows have passed."""
        return sum(self._layer_bytes(one) for one in self.shape.layers if not self._window(one))

    def sequence_bytes(self, tokens: int | float) -> float:
        """Returns the bytes of a sequence of `tokens` tokens."""
        whole, windows = self.bytes_per_old_token, self._windows
        return whole * tokens + sum(each * min(tokens, window) for window, each in windows)

    def tokens_in(self, num_bytes: float) -> float:
        """Returns the tokens of the longest sequence that fits into `num_bytes`; infinite if
        windows or states bound its size. The inverse of `sequence_bytes`.
        """
        left, slope, at = num_bytes, self.bytes_per_token, 0.0
        for window, each in sorted(self._windows):
            needed = slope * (window - at)
            if needed > left * (1 + 1e-12):
                break
            left, slope, at = left - needed, slope - each, float(window)
        # Sums of parts may leave a rest instead of 0.
        if slope <= 1e-9:
            return float("inf")
        return at + max(0.0, left) / slope

    @property
    def formula(self) -> str:
        """The bytes of one token as a product, with the numbers put in."""
        counted = Counter(layer for layer in self.shape.layers if layer.kv is not None)
        parts = [self._part(layer, count) for layer, count in counted.items()]
        return " + ".join(parts) if parts else "0"

    @property
    def kinds(self) -> str:
        """Describes the attention of the layers."""
        return ", ".join(
            f"{count} {_attention(layer, self.shape.heads)}"
            for layer, count in Counter(self.shape.layers).items()
        )

    @property
    def longest_window(self) -> int:
        """The tokens that the longest window keeps; 0 if all layers keep all tokens."""
        return max((window for window, _ in self._windows), default=0)

    @cached_property
    def _windows(self) -> list[tuple[int, float]]:
        """(tokens, bytes per token) of each window."""
        found: Counter[int] = Counter()
        for layer in self.shape.layers:
            if window := self._window(layer):
                # Sizes are multiples of half a byte.
                found[window] += round(2 * self._layer_bytes(layer))
        return [(window, double / 2) for window, double in found.items()]

    def _window(self, layer: LayerShape) -> int:
        """The tokens that the layer keeps; 0 for all."""
        window = 0
        if layer.window and self.form == "compact":
            window = layer.window
        elif layer.window and self.is_cpu and self.degree == 1:
            window = layer.window + ROUND
        return min((limit for limit in (self.budget_tokens, window) if limit), default=0)

    def _layer_bytes(self, layer: LayerShape) -> float:
        if layer.kv is None:
            return 0.0
        if self.keeps_latent(layer):
            return self.degree * self._vector_bytes(layer.latent)
        kept = -(-layer.kv.kv_heads // self.degree) * self.degree
        return kept * (self._vector_bytes(layer.kv.k_dim) + self._vector_bytes(layer.kv.v_dim))

    def _vector_bytes(self, dim: int) -> float:
        return dim * KV_DTYPES[self.dtype] + _SCALED.get(self.dtype, 0.0)

    def keeps_latent(self, layer: LayerShape) -> bool:
        """Whether the latent vectors of the layer are kept, and not K and V."""
        return layer.kind == "latent" and (self.form == "compact" or self.degree == 1)

    def _part(self, layer: LayerShape, count: int) -> str:
        value, scale = f"{KV_DTYPES[self.dtype]:g} B", _SCALED.get(self.dtype)
        kv = layer.kv or LayerKv(0, 0, 0)
        layers = f"{count} layers"
        if self.keeps_latent(layer):
            size = f"{layer.latent} latent values x {value}"
            return f"{layers} x ({size} + {scale:g} B)" if scale else f"{layers} x {size}"
        heads = f"{kv.kv_heads} KV heads" if kv.kv_heads > 1 else "1 KV head"
        if kv.k_dim != kv.v_dim:
            dims = f"({kv.k_dim} + {kv.v_dim}) x {value}"
            added = f" + {2 * scale:g} B" if scale else ""
            return (
                f"{layers} x {heads} x ({dims}{added})" if scale else f"{layers} x {heads} x {dims}"
            )
        each = f"({kv.k_dim} x {value} + {scale:g} B)" if scale else f"{kv.k_dim} x {value}"
        return f"2 x {layers} x {heads} x {each}"


def _attention(layer: LayerShape, heads: int) -> str:
    """Names the kind of attention of a layer."""
    if layer.kv is None:
        return {
            "state": "with a state of fixed size",
            "shared": "with the KV of another layer",
        }.get(layer.kind, "without attention")
    if layer.kind == "latent":
        return "latent (MLA)"
    name = "MHA" if layer.kv.kv_heads == heads else "MQA" if layer.kv.kv_heads == 1 else "GQA"
    return f"{name} with a window of {layer.window:,}" if layer.window else name
