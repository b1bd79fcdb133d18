"""The queries of a sequence's last tokens, which tell what the next tokens will attend to."""

from __future__ import annotations

import torch

from kvrelay.types.token_eviction import WINDOW


class RecentQueries:
    """Queries of WINDOW consecutive tokens. Written in the engine's thread."""

    def __init__(self, first: int) -> None:
        """first: position of the first of these tokens."""
        self._first = first
        self._next = first
        # [Hq, WINDOW, Dk] of each layer, float32.
        self._layers: list[torch.Tensor] = []
        # The factor of each layer's scores.
        self.scales: list[float] = []

    @property
    def last(self) -> int:
        """Position of the last of these tokens."""
        return self._first + WINDOW - 1

    def begin(self, position: int) -> None:
        """The position of the first token of the next step, which may repeat a step that failed."""
        self._next = position

    def add(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """See `step_input.Queries`. Other tokens than the wanted ones are left out."""
        if layer == len(self._layers):
            self._layers.append(torch.zeros(len(query), WINDOW, query.shape[-1]))
            self.scales.append(scale)
        begin = self._next - self._first
        rows = range(max(begin, 0), min(begin + query.shape[1], WINDOW))
        if rows:
            kept = query[:, rows.start - begin : rows.stop - begin]
            self._layers[layer][:, rows.start : rows.stop] = kept

    def of(self, layer: int) -> torch.Tensor:
        """The queries [Hq, WINDOW, Dk] of a layer, float32."""
        return self._layers[layer]
