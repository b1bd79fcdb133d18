"""The memory that one copy of a model takes besides KV: weights and activations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvrelay.models.model_shape import ModelShape

# Bytes of one parameter. int4: groups of 128 share a 16-bit scale and a 4-bit zero point (Lin et
# al., "AWQ", 2023, section 5.1). mxfp4: groups of 32 share an 8-bit scale (OCP Microscaling Formats
# 1.0, section 5.2).
WEIGHT_DTYPES = {
    "float32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": (4 + 20 / 128) / 8,
    "mxfp4": (4 + 8 / 32) / 8,
}
# Bytes of an activation, and of a logit.
_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 4


# Without slots, since the sums over the layers are computed once.
@dataclass(frozen=True)
class ModelMemory:
    """Weights and activations of one copy of a model, in bytes."""

    shape: ModelShape
    weight_bytes: float
    # Dtype of the weights. Products are computed in it where the device can.
    weight_dtype: str
    # Where the size of the weights comes from.
    source: str

    @property
    def bytes_per_parameter(self) -> float:
        """Mean bytes of a parameter."""
        return self.weight_bytes / self.shape.parameters

    def read_bytes(self, tokens: float) -> float:
        """Returns the bytes of the weights that a step of `tokens` tokens reads: all matrices that
        every token visits, and the experts that at least one token visits.

        A token visits k of E experts, so a step misses an expert with probability (1 - k / E) **
        tokens, if the router spreads tokens evenly. The matrix of the embeddings is not read as a
        whole, unless the head shares it.
        """
        always, groups = self._read
        read: float = always + sum(
            size * (1.0 - (1.0 - chosen / experts) ** tokens)
            for (experts, chosen), size in groups.items()
        )
        return read * self.bytes_per_parameter

    @cached_property
    def _read(self) -> tuple[float, dict[tuple[int, int], float]]:
        """Parameters that every step reads, and those of experts by (experts, chosen)."""
        shape = self.shape
        groups: dict[tuple[int, int], float] = {}
        for one in shape.feed_forward:
            if one.experts > one.chosen:
                key = one.experts, one.chosen
                groups[key] = groups.get(key, 0.0) + one.expert_parameters
        return float(shape.dense_parameters - shape.lookup_parameters), groups

    def activation_bytes(self, tokens: int, rows: int) -> float:
        """Returns the bytes of the largest tensors that live together in a step of `tokens` tokens
        with logits of `rows` of them.

        Two hidden states and the widest rows of one layer: gate, up and product of the feed-forward
        layer, or queries, keys, values and output of the attention. Then the logits in float32.
        """
        shape = self.shape
        widest = 3 * shape.intermediate * max(1, *(one.chosen for one in shape.feed_forward))
        kv = next((layer.kv for layer in shape.layers if layer.kv is not None), None)
        if kv is not None:
            attended = shape.heads * (kv.k_dim + kv.v_dim) + kv.kv_heads * (kv.k_dim + kv.v_dim)
            widest = max(widest, attended)
        values = tokens * (2 * shape.hidden + widest)
        return values * _ACTIVATION_BYTES + rows * shape.vocab * _LOGIT_BYTES


def matrix_parameters(shape: ModelShape) -> int:
    """Returns the parameters that a token is multiplied with. The embeddings are looked up, unless
    the head shares them.
    """
    return shape.active_parameters - shape.lookup_parameters
