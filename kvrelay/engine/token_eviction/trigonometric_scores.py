"""Scores by the queries that a model usually has: TriAttention (Mao et al., 2026,
arXiv:2604.04921).

Before they are turned by their position, the queries of a head lie around a centre that depends
little on the text. So the score of a key for a query that comes D positions later is about a
trigonometric series in D, whose coefficients are the centre and the key. A token's score is the
mean over D = 1, 2, 4, ... up to 65,536, plus a part for what the centre does not tell: the length
of the key, as far as queries scatter around their centre.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.token_eviction.rotary import Rotary
from kvrelay.engine.token_eviction.stored_keys import StoredKeys
from kvrelay.engine.token_eviction.token_scores import HeldTokens

# Distances from the last token to later queries.
DISTANCES = torch.tensor([2**power for power in range(17)])
# How much the head that needs a token most counts, compared with the others.
_SHARPNESS = 2.0


@dataclass(frozen=True, slots=True)
class QueryCentre:
    """How the queries of a layer lie before they are turned. F is the number of turned pairs."""

    # Mean of the pairs: complex64 [Hq, F].
    mean: torch.Tensor
    # Mean of their lengths: float32 [Hq, F].
    length: torch.Tensor
    # Mean of the values that are not turned: float32 [Hq, Dk - 2 * F].
    rest: torch.Tensor

    @classmethod
    def of(cls, queries: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> QueryCentre:
        """Of queries [Hq, T, Dk] after the position embedding, at positions [T]."""
        pairs = rotary.pairs(queries) * rotary.phases(positions).conj()
        rest = queries[..., rotary.turned :].mean(dim=1)
        return cls(pairs.mean(dim=1), pairs.abs().mean(dim=1), rest)

    def expected(self, turn: torch.Tensor) -> torch.Tensor:
        """The centre after a turn [F], as a vector: [Hq, Dk]."""
        turned = self.mean * turn
        return torch.cat((turned.real, turned.imag, self.rest), dim=-1)

    @property
    def scatter(self) -> torch.Tensor:
        """How long queries are beside their centre: [Hq, F]."""
        return (self.length - self.mean.abs()).clamp_min(0)


class TrigonometricScores:
    """Scores of one model."""

    needs_queries = False

    def __init__(
        self,
        keys: StoredKeys,
        rotary: Rotary,
        centres: Sequence[QueryCentre],
        kv_heads: Sequence[int],
    ) -> None:
        """centres and kv_heads: of each layer."""
        self._keys = keys
        self._rotary = rotary
        self._centres = centres
        self._kv_heads = kv_heads
        self._ahead = rotary.phases(DISTANCES).mean(dim=0)

    def of(self, tokens: HeldTokens) -> torch.Tensor:
        """See `TokenScores`."""
        positions = tokens.positions
        turn = self._rotary.phases(positions.max()) * self._ahead
        of_heads = []
        for layer, (centre, kv_heads) in enumerate(zip(self._centres, self._kv_heads, strict=True)):
            at = layer, tokens.blocks, len(positions)
            # The query heads of a group are rows of one matrix product.
            found = self._keys.products(*at, _by_group(centre.expected(turn), kv_heads))
            found += self._keys.lengths(*at, _by_group(centre.scatter, kv_heads))
            of_heads.append(_normal(found).flatten(0, 1))
        # About the largest score of all heads, and larger if several heads agree.
        return torch.logsumexp(_SHARPNESS * torch.cat(of_heads), dim=0)


def _by_group(vectors: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[Hq, n] -> [Hkv, G, n]."""
    return vectors.view(kv_heads, -1, vectors.shape[-1])


def _normal(scores: torch.Tensor) -> torch.Tensor:
    """Scores with mean 0 and standard deviation 1 over the last dimension, since heads have scores
    of different sizes.
    """
    spread = scores.std(dim=-1, keepdim=True).clamp_min(1e-12)
    return (scores - scores.mean(dim=-1, keepdim=True)) / spread
