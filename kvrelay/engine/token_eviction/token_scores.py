"""How much the KV of each token of a sequence matters. The tokens with the lowest scores are
dropped.

Blocks hold the KV of all layers and heads, so a token is kept or dropped in all of them, and it is
kept if one of them needs it. The papers keep other tokens in each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine.token_eviction.recent_queries import RecentQueries
from kvrelay.engine.token_eviction.stored_keys import StoredKeys


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """The tokens of a sequence that have KV."""

    # [n] int64: the block table.
    blocks: torch.Tensor
    # [rows] int64: position of each row's token.
    positions: torch.Tensor
    # Of the last tokens; None unless the scores need them.
    queries: RecentQueries | None = None


class TokenScores(Protocol):
    """A method of eviction."""

    # Whether the queries of the last tokens are needed.
    needs_queries: bool

    def of(self, tokens: HeldTokens) -> torch.Tensor:
        """The scores [rows] of the tokens, float32."""
        ...


class WindowScores:
    """The last tokens matter most: StreamingLLM (Xiao et al., 2023)."""

    needs_queries = False

    def of(self, tokens: HeldTokens) -> torch.Tensor:
        """See `TokenScores`."""
        return tokens.positions.float()


class AttentionScores:
    """What one of the last tokens attended to in any head matters most.

    This is SnapKV (Li et al., 2024, section 4) for one choice of tokens in all heads. SnapKV takes
    the mean of the last queries, and keeps the neighbours of what they attend to. Here both would
    hide a token that one head needs (`benchmarks/token_eviction.py`).
    """

    needs_queries = True

    def __init__(self, keys: StoredKeys, kv_heads: Sequence[int]) -> None:
        """kv_heads: of each layer."""
        self._keys = keys
        self._kv_heads = kv_heads

    def of(self, tokens: HeldTokens) -> torch.Tensor:
        """See `TokenScores`."""
        count = len(tokens.positions)
        assert tokens.queries is not None
        most = torch.zeros(count)
        for layer, kv_heads in enumerate(self._kv_heads):
            queries = tokens.queries.of(layer) * tokens.queries.scales[layer]
            # The query heads of a group are rows of one matrix product.
            grouped = queries.reshape(kv_heads, -1, queries.shape[-1])
            scores = self._keys.products(layer, tokens.blocks, count, grouped)
            most = most.maximum(scores.softmax(dim=-1).amax(dim=(0, 1)))
        return most
