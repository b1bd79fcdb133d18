"""The input of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Queries(Protocol):
    """Keeps the queries of a sequence's new tokens."""

    def add(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Takes the queries [Hq, new, Dk] of the sequence's new tokens in a layer, after the
        position embedding, and the factor of their scores. Layers come in order. The memory is
        valid during the call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """The new tokens of one sequence: rows [row, row + new) of the pass, after `past` tokens whose
    KV is stored, and `dropped` tokens whose KV was.
    """

    row: int
    new: int
    past: int
    # The sequence's block table, at least up to the last new token.
    blocks: Sequence[int]
    # The slot of the sequence's adapter; None for the base model.
    adapter: int | None = None
    dropped: int = 0
    # Told the queries of the new tokens, if anybody needs them.
    queries: Queries | None = None

    @property
    def end(self) -> int:
        """Tokens with KV, new tokens included."""
        return self.past + self.new


def show_queries(parts: Sequence[Part], layer: int, query: torch.Tensor, scale: float) -> None:
    """Gives each part that asks for them its queries of a layer; query [1, Hq, T, Dk]."""
    for part in parts:
        if part.queries is not None:
            part.queries.add(layer, query[0, :, part.row : part.row + part.new], scale)


OnLayer = Callable[[int], None]
"""Told in the engine's thread that a layer's new KV is stored, or, on a GPU, will be before
whatever is asked of it next. Layers come in order; short steps may leave it out."""


@dataclass(frozen=True, slots=True)
class Step:
    """T new tokens of several sequences, and the rows after which logits are computed."""

    token_ids: Sequence[int]  # [T]
    parts: Sequence[Part]
    rows: Sequence[int]
    on_layer: OnLayer | None = None

    @property
    def positions(self) -> list[int]:
        """[T]: the position of each token in its sequence."""
        return [part.dropped + place for part in self.parts for place in range(part.past, part.end)]

    def slots(self, block_size: int) -> list[int]:
        """[T]: block * block_size + offset, where the KV of each token goes."""
        return [
            part.blocks[place // block_size] * block_size + place % block_size
            for part in self.parts
            for place in range(part.past, part.end)
        ]

    @property
    def decodes(self) -> bool:
        """True if each sequence has exactly one new token."""
        return len(self.token_ids) == len(self.parts)

    def padded(self, num_parts: int, block: int) -> Step:
        """Adds sequences of one token in the unowned block `block`, and rows of logits, up to
        `num_parts` of each.
        """
        more = range(len(self.parts), num_parts)
        row = len(self.token_ids)
        return Step(
            [*self.token_ids, *(0 for _ in more)],
            [*self.parts, *(Part(row + i, 1, 0, (block,)) for i in range(len(more)))],
            [*self.rows, *(0 for _ in range(len(self.rows), num_parts))],
        )
