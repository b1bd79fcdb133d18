"""The queries of a sequence's last tokens, which tell what the next tokens will attend to."""

from __future__ import annotations

import torch

# Tokens whose queries are kept. SnapKV (Li et al., 2024) takes 16 to 64.
WINDOW = 16


class RecentQueries:
    """Queries of up to WINDOW decode steps. Written by the engine's thread."""

    def __init__(self) -> None:
        self._steps: list[list[torch.Tensor]] = []
        # Factor of a layer's scores, by layer.
        self.scales: list[float] = []

    @property
    def complete(self) -> bool:
        """Whether WINDOW steps have been seen."""
        return len(self._steps) >= WINDOW

    def add(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Takes the query of the first new token of a step; see `step_input.Queries`."""
        if layer == 0:
            # A step that failed on its way has not all layers.
            whole = [step for step in self._steps if len(step) == len(self._steps[0])]
            self._steps = [*whole[1 - WINDOW :], []]
            self.scales = []
        self._steps[-1].append(query[:, 0].float().clone())
        self.scales.append(scale)

    def of(self, layer: int) -> torch.Tensor:
        """The queries [Hq, W, Dk] of a layer, oldest first, float32."""
        return torch.stack([step[layer] for step in self._steps], dim=1)
