"""Rank 0's forward pass, which all ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import OnLayer, Step
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.engine.parallel.step_message import step_to_numbers


class RanksForward:
    """Sends each step to the other ranks and computes it with them."""

    def __init__(self, model: PreTrainedModel, kv: KvPool, group: RankGroup) -> None:
        self._forward = TorchForward(model, kv)
        self._num_layers = len(kv.layout.layers)
        self._group = group

    def __call__(self, step: Step) -> torch.Tensor:
        """Stores the KV of all new tokens, on all ranks. Returns logits [len(step.rows),
        vocab_size].

        Raises RankLost for every error, since the state of the ranks may then differ.
        """
        try:
            self._group.tell(step_to_numbers(step))
            logits = self._forward(
                replace(step, on_layer=step.on_layer and _one_later(step.on_layer))
            )
            if logits.is_cuda:
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            self._group.fail(f"rank 0 failed in a step of all ranks: {error}")
            raise RankLost(self._group.lost()) from error
        if step.on_layer is not None:
            step.on_layer(self._num_layers - 1)
        return logits


def _one_later(on_layer: OnLayer) -> Callable[[int], None]:
    """Reports each layer when this rank stores the next layer's KV. By then all ranks have stored
    it: a sum over the ranks' attention outputs lies between the two layers.
    """

    def stored_here(index: int) -> None:
        if index:
            on_layer(index - 1)

    return stored_here
