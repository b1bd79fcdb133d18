"""Scores by the queries that a model usually has: TriAttention (Mao et al., 2026,
arXiv:2604.04921).

Before they are turned by their position, the queries of a head lie around a centre that depends
little on the text. So the score of a key for a query that comes D positions later is about a
trigonometric series in D, whose coefficients are the centre and the key. A token's score is the
mean over D = 1, 2, 4, ... up to 65,536, plus a part for what the centre does not tell: the length
of the key, as far as queries scatter around their centre.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.token_eviction.rotary import Rotary
from kvrelay.engine.token_eviction.row_mover import RowMover
from kvrelay.engine.token_eviction.token_scores import HeldTokens

# Distances from the last token to later queries.
DISTANCES = torch.tensor([2**power for power in range(17)])


@dataclass(frozen=True, slots=True)
class QueryCentre:
    """How the queries of a layer lie before they are turned. F is the number of turned pairs."""

    # Mean of the pairs: complex64 [Hq, F].
    mean: torch.Tensor
    # Mean of their lengths: float32 [Hq, F].
    length: torch.Tensor

    @classmethod
    def of(cls, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> QueryCentre:
        """Of queries [Hq, T, Dk] after the position embedding, at positions [T]."""
        pairs = rotary.pairs(queries) * rotary.phases(positions).conj()
        return cls(pairs.mean(dim=1), pairs.abs().mean(dim=1))


class TrigonometricScores:
    """Scores of one model."""

    needs_queries = False

    def __init__(self, mover: RowMover, rotary: Rotary, centres: list[QueryCentre]) -> None:
        """centres: of each layer."""
        self._mover = mover
        self._rotary = rotary
        self._centres = centres
        self._ahead = rotary.phases(DISTANCES).mean(dim=0)

    def of(self, tokens: HeldTokens) -> torch.Tensor:
        """See `TokenScores`."""
        positions = tokens.positions
        turn = self._rotary.phases(positions.max()) * self._ahead
        total = torch.zeros(len(positions))
        for layer, centre in enumerate(self._centres):
            keys = self._rotary.pairs(self._mover.keys(layer, tokens.blocks, len(positions)))
            expected, scatter = _by_group(centre, turn, keys.shape[1])
            # A score is the real part of query * conj(key).
            found = torch.einsum("hgf,shf->hgs", expected, keys.conj()).real
            found += torch.einsum("hgf,shf->hgs", scatter, keys.abs())
            spread = found.std(dim=-1, keepdim=True).clamp_min(1e-12)
            # Heads have scores of different sizes. A key is kept for the head that needs it most.
            total += ((found - found.mean(dim=-1, keepdim=True)) / spread).amax(dim=1).mean(dim=0)
        return total / len(self._centres)


def _by_group(
    centre: QueryCentre, turn: torch.Tensor, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected later query, complex64 [Hkv, G, F], and how long queries are beside it,
    float32.
    """
    shape = kv_heads, -1, centre.mean.shape[-1]
    scatter = (centre.length - centre.mean.abs()).clamp_min(0)
    return (centre.mean * turn).view(shape), scatter.view(shape)
