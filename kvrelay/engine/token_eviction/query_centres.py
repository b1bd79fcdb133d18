"""Measures where a model's queries lie, over a short text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.sequence_segment import Segment
from kvrelay.engine.token_eviction.calibration_text import TEXT
from kvrelay.engine.token_eviction.rotary import Rotary
from kvrelay.engine.token_eviction.trigonometric_scores import QueryCentre
from kvrelay.errors import ConfigError

# Tokens, at most.
LENGTH = 512
# Fewer tokens of the text do not tell what is usual: its words are unknown to the tokenizer.
_LEAST = 16
# Positions between the two runs of the check.
_APART = 64
# Largest relative difference of the first layer's queries, once they are turned back.
_UNLIKE = 0.05

Forward = Callable[[Sequence[Segment], Sequence[int]], torch.Tensor]
"""Runs segments, and returns logits after some of their tokens."""


class _Centres:
    """Takes the queries of one run."""

    def __init__(self, positions: torch.Tensor, rotary: Rotary) -> None:
        self._positions = positions
        self._rotary = rotary
        self.found: list[QueryCentre] = []
        # The pairs of the first layer, turned back: [Hq, T, F].
        self.first = torch.empty(0)

    def add(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """See `step_input.Queries`."""
        query = query.float()
        if layer == 0:
            turned_back = self._rotary.phases(self._positions).conj()
            self.first = self._rotary.pairs(query) * turned_back
        self.found.append(QueryCentre.of(query, self._positions, self._rotary))


def query_centres(
    loaded: LoadedModel, kv: KvPool, max_model_len: int, rotary: Rotary, forward: Forward
) -> list[QueryCentre]:
    """The centre of each layer's queries. Overwrites the first blocks of the memory.

    max_model_len: positions that `forward` takes, at most those of the model. Raises ConfigError if
    the first layer's queries are not turned as `Rotary` says: there they depend on the position in
    no other way.
    """
    room = min(LENGTH, max_model_len - _APART, kv.num_blocks * kv.layout.block_size)
    tokens = _tokens(loaded, max(1, room))
    apart = min(_APART, max_model_len - len(tokens))
    runs = []
    for start in (0, apart):
        run = _Centres(torch.arange(start, start + len(tokens)), rotary)
        blocks = range(kv.layout.blocks_for(len(tokens)))
        forward([Segment(tokens, start, blocks, dropped=start, queries=run)], [len(tokens) - 1])
        runs.append(run)
    here, there = (run.first for run in runs)
    if not apart or (here - there).norm() > _UNLIKE * here.norm():
        raise ConfigError(
            "kv.eviction: triattention needs rotary position embeddings in the order of Llama, "
            f"which {type(loaded.model).__name__} does not have; set method: attention"
        )
    return runs[0].found


def _tokens(loaded: LoadedModel, room: int) -> list[int]:
    """Tokens of the text, or any tokens if the model has no tokenizer for it."""
    tokens = _tokens_of_text(loaded)[:room]
    if len(tokens) >= min(room, _LEAST):
        return tokens
    generator = random.Random(0)
    return [generator.randrange(loaded.vocab_size) for _ in range(room)]


def _tokens_of_text(loaded: LoadedModel) -> list[int]:
    """Empty if the model has no tokenizer that can read the text."""
    path = Path(loaded.folder or "", "tokenizer.json")
    if not loaded.folder or not path.exists():
        return []
    try:
        tokens = Tokenizer.from_file(str(path)).encode(TEXT).ids
    # Tokenizers raise nothing more specific.
    except Exception:  # noqa: BLE001
        return []
    return [token for token in tokens if token < loaded.vocab_size]
