"""Drops the tokens of a sequence that matter least, and compacts the others into fewer blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.token_eviction.compaction import Compaction, compact
from kvrelay.engine.token_eviction.recent_queries import RecentQueries
from kvrelay.engine.token_eviction.row_mover import RowMover
from kvrelay.engine.token_eviction.token_scores import HeldTokens, TokenScores

# Last tokens that are always kept.
RECENT = 32


@dataclass(frozen=True, slots=True)
class Overfull:
    """A sequence with more KV than it may keep."""

    blocks: Sequence[int]
    # Position of each token with KV, in the order of its rows.
    positions: Sequence[int]
    # Blocks to give back, at least.
    num_blocks: int
    # Places in `blocks` of those that others read too.
    fixed: frozenset[int]
    queries: RecentQueries | None


class TokenEvictor:
    """Evicts tokens from one KV memory. Runs in the engine's thread, between steps."""

    def __init__(self, mover: RowMover, scores: TokenScores, block_size: int) -> None:
        self._mover = mover
        self._scores = scores
        self._size = block_size

    @property
    def needs_queries(self) -> bool:
        """Whether the queries of the last tokens are needed."""
        return self._scores.needs_queries

    @torch.inference_mode()
    def plan(self, sequence: Overfull) -> Compaction:
        """Chooses the tokens to drop, and the moves that free their memory.

        The first block is kept, since models attend to their first tokens whatever these are
        (attention sinks: StreamingLLM, Xiao et al., 2023), and the last RECENT tokens.
        """
        positions = torch.tensor(sequence.positions)
        scores = self._scores.of(
            HeldTokens(torch.tensor(sequence.blocks), positions, sequence.queries)
        )
        kept = (positions < self._size) | (positions > positions.max() - RECENT)
        # The last block, which new tokens follow.
        kept[len(positions) // self._size * self._size :] = True
        scores = scores.nan_to_num(0.0).masked_fill(kept, torch.inf)
        count = sequence.num_blocks * self._size
        dropped = scores.topk(count, largest=False, sorted=False).indices
        return compact(
            dropped.tolist(), len(positions), len(sequence.blocks), self._size, sequence.fixed
        )

    @torch.inference_mode()
    def move(self, blocks: Sequence[int], plan: Compaction) -> None:
        """Moves the rows of a plan. blocks: the sequence's blocks, then the spare ones."""
        size = self._size
        self._mover.move(
            [blocks[row // size] * size + row % size for row, _, _ in plan.moves],
            [blocks[place] * size + offset for _, place, offset in plan.moves],
        )
