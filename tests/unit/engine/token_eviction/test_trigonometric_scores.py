"""A token's score is the mean of its attention scores for queries that lie at the centre, at each
of the distances, as the papers define it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from support.tiny_models import VOCAB

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.rotary import Rotary
from kvrelay.engine.token_eviction.stored_keys import StoredKeys
from kvrelay.engine.token_eviction.token_scores import HeldTokens
from kvrelay.engine.token_eviction.trigonometric_scores import (
    DISTANCES,
    QueryCentre,
    TrigonometricScores,
)

LENGTH = 60


class Kept:
    def __init__(self) -> None:
        self.queries: list[torch.Tensor] = []

    def add(self, layer: int, query: torch.Tensor, scale: float) -> None:
        self.queries.append(query.float().clone())


def turned(vector: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """The vector [dim], turned by the position as transformers does it."""
    angles = torch.cat((frequencies, frequencies)) * position
    half = len(vector) // 2
    rotated = torch.cat((-vector[half:], vector[:half]))
    return vector * angles.cos() + rotated * angles.sin()


def test_scores_are_those_of_turned_centres(tiny_model: Callable[..., Path]) -> None:
    runner = ModelRunner.load(
        str(tiny_model("llama")), block_size=16, kv_bytes=1 << 20, eviction="triattention"
    )
    tokens = [(7 * n + 3) % VOCAB for n in range(LENGTH)]
    kept = Kept()
    runner.forward([Segment(tokens, 0, range(4), queries=kept)], [LENGTH - 1])
    model = runner._forward._model  # type: ignore[union-attr]
    rotary = Rotary.of(model)
    assert rotary is not None
    frequencies = rotary.frequencies.float()
    at = torch.arange(LENGTH)
    centres = [QueryCentre.of(query, at, rotary) for query in kept.queries]
    keys = StoredKeys(runner.kv)
    found = TrigonometricScores(keys, rotary, centres, [2, 2]).of(
        HeldTokens(torch.arange(4), torch.arange(LENGTH))
    )
    normal = []
    for layer, queries in enumerate(kept.queries):
        of_layer = keys.keys(layer, torch.arange(4), LENGTH)
        groups = queries.shape[0] // len(of_layer)
        heads = torch.zeros(queries.shape[0], LENGTH)
        for head, of_head in enumerate(queries):
            plain = torch.stack([turned(q, -p, frequencies) for p, q in enumerate(of_head)])
            centre = plain.mean(dim=0)
            pairs = torch.complex(*plain.chunk(2, dim=-1))
            scatter = pairs.abs().mean(dim=0) - pairs.mean(dim=0).abs()
            for row in range(LENGTH):
                key = of_layer[head // groups, row]
                scores = [
                    torch.dot(turned(centre, LENGTH - 1 + int(far), frequencies), key)
                    for far in DISTANCES
                ]
                length = torch.complex(*key.chunk(2)).abs()
                heads[head, row] = sum(scores) / len(DISTANCES) + torch.dot(scatter, length)
        normal.append((heads - heads.mean(1, keepdim=True)) / heads.std(1, keepdim=True))
    runner.close()
    wanted = (2 * torch.cat(normal)).exp().sum(dim=0).log()
    assert math.isclose((found - wanted).abs().max().item(), 0, abs_tol=5e-3)
