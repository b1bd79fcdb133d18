"""What one forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's new tokens: rows [row, row + new) of the pass, after `past` tokens whose KV is there."""

    row: int
    new: int
    past: int
    blocks: Sequence[int]  # its block table, up to the last new token at least

    @property
    def end(self) -> int:
        return self.past + self.new


@dataclass(frozen=True, slots=True)
class Step:
    """T new tokens of several sequences, and the rows after which logits are wanted."""

    token_ids: Sequence[int]  # [T]
    parts: Sequence[Part]
    rows: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """[T], of each token in its sequence."""
        return [position for part in self.parts for position in range(part.past, part.end)]
