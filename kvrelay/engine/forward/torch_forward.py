"""A forward pass by torch operators, on any device and for any supported model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.attention.ragged_batch import RaggedBatch, SequencePart
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Step


class TorchForward:
    """Runs each step through the model's Python code."""

    def __init__(
        self, model: PreTrainedModel, kv: KvPool, adapters: StepAdapters | None = None
    ) -> None:
        """`adapters` is read by the layers that adapters change."""
        self._model = model
        self._kv = kv
        self._adapters = adapters or StepAdapters()

    def __call__(self, step: Step) -> torch.Tensor:
        """Stores the KV of all new tokens. Returns logits [len(step.rows), vocab_size].

        The step is complete when the logits have been read or, if there are none, when this
        returns.
        """
        self._adapters.update(step.parts)
        output = self._model(
            input_ids=self._tensor(step.token_ids)[None],
            position_ids=self._tensor(step.positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(step.rows),
            ragged_batch=self.batch(step),
        )
        logits: torch.Tensor = output.logits[0]
        if not step.rows and logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        return logits

    def batch(self, step: Step) -> RaggedBatch:
        """The attention of a step."""
        layout = self._kv.layout
        parts = [
            SequencePart.of(part, self._tensor(part.blocks[: layout.blocks_for(part.end)]))
            for part in step.parts
        ]
        slots = self._tensor(step.slots(layout.block_size))
        asking = [part for part in step.parts if part.queries is not None]
        return RaggedBatch(self._kv, slots, parts, step.on_layer, asking)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._model.device)
