"""The FLOPs and bytes of a model, computed from its shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig

from kvrelay.bench.limits import Limits
from kvrelay.bench.shapes import DTYPE, random_model
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.errors import InvalidArgument
from kvrelay.types.kv_layout import DTYPE_BYTES

# Tables: each token reads one row of them.
_TABLES = ("embed_tokens", "wte", "wpe", "embed_positions")


@dataclass(frozen=True, slots=True)
class Work:
    """flops: floating-point operations; a multiply-add counts as two. bytes: read from memory."""

    flops: float
    bytes: float

    def compute_seconds(self, limits: Limits, dtype: str) -> float:
        """Returns the least time for the FLOPs, in seconds, at the measured rate of `dtype`."""
        return self.flops / limits.matrix_rate(dtype)

    def memory_seconds(self, limits: Limits) -> float:
        """Returns the least time for the bytes, in seconds, at the measured bandwidth."""
        return self.bytes / limits.bandwidth


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of a dense decoder. Matrix sizes are in elements."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    # All matrices except tables and head. Each token is multiplied by them.
    body: int
    # vocabulary x hidden. Only tokens whose logits are needed are multiplied by it.
    head: int
    max_model_len: int
    vocab_size: int
    dtype: str

    def kv_token_bytes(self) -> int:
        """KV bytes per token: 2 · layers · kv_heads · head_dim · bytes per value."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the matrices that a decode step reads if they are stored in `dtype`."""
        return (self.body + self.head) * DTYPE_BYTES[dtype]

    def prefill(self, tokens: int, chunk_tokens: int, weights: str) -> Work:
        """The cost of a prompt that is prefilled in chunks, up to its first token.

        The FLOPs are 2 · body · tokens + 2 · head, plus 4 · layers · heads · head_dim · tokens² / 2
        for attention. Each chunk reads the weights and the KV of the chunks before it.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * tokens**2 / 2
        chunks = math.ceil(tokens / chunk_tokens)
        kv_tokens = chunk_tokens * chunks * (chunks - 1) / 2
        return Work(
            flops=2 * (self.body * tokens + self.head) + attention,
            bytes=chunks * self.weight_bytes(weights) + kv_tokens * self.kv_token_bytes(),
        )

    def decode(self, batch: int, context: int, weights: str) -> Work:
        """The cost of one decode step for a batch of sequences of `context` tokens. The batch reads
        the weights once.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * context * batch
        return Work(
            flops=2 * (self.body + self.head) * batch + attention,
            bytes=self.weight_bytes(weights) + self.kv_token_bytes() * context * batch,
        )


def model_cost(path: str) -> ModelCost:
    """Returns the cost of the checkpoint in a folder or under a hub id. Does not read the weights.

    Raises ModelRefused. Raises InvalidArgument for a mixture-of-experts model, because a token uses
    only some of the experts.
    """
    checkpoint = find_checkpoint(path)
    config: Any = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    dtype = str(config.get_text_config().dtype or "float32").removeprefix("torch.")
    return _cost(path, config, _matrices(checkpoint.weights), dtype)


def shape_cost(shape: str) -> ModelCost:
    """Returns the cost of a model that is given by its shape alone. Raises InvalidArgument like
    `model_cost`.
    """
    model = random_model(shape, "meta")
    # A tied parameter appears once, as the table.
    parameters = model.named_parameters()
    matrices = ((name, list(one.shape)) for name, one in parameters if one.dim() > 1)
    return _cost(shape, model.config, matrices, DTYPE)


def _cost(
    name: str, config: Any, matrices: Iterable[tuple[str, list[int]]], dtype: str
) -> ModelCost:
    config = config.get_text_config()
    if any("expert" in key for key in config.to_dict()):
        raise InvalidArgument(
            f"{name} is a mixture-of-experts model; the limits are computed for dense models only",
            field="model",
        )
    body, head, table = 0, 0, 0
    for weight, shape in matrices:
        if any(part in _TABLES for part in weight.split(".")):
            table = max(table, math.prod(shape))
        elif weight.startswith("lm_head."):
            head = math.prod(shape)
        else:
            body += math.prod(shape)
    heads = config.num_attention_heads
    return ModelCost(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        body=body,
        # With tied weights, the embedding table is the head.
        head=head or table,
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype=dtype,
    )


def _matrices(files: tuple[Path, ...]) -> Iterator[tuple[str, list[int]]]:
    """Yields the name and the shape of each tensor with two or more dimensions."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                shape = tensors.get_slice(name).get_shape()
                if len(shape) > 1:
                    yield name, shape
