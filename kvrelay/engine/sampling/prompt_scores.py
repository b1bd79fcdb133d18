"""The log-probabilities of a prompt's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.engine.base.device import to_device
from kvrelay.engine.sampling.faults import SequenceFault
from kvrelay.engine.sampling.sampler import LEAST_LOGPROB
from kvrelay.types.requests import PromptLogprobs


class PromptScores:
    """Collects the log-probabilities of a prompt's tokens while its chunks are computed, in any
    order and also if a chunk is computed again.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        """count: number of likeliest tokens at each place."""
        self._targets = np.asarray(prompt[1:], np.int64)
        self._logprobs = np.zeros(len(self._targets), np.float32)
        self._top_ids = np.zeros((len(self._targets), count), np.int32)
        self._top_logprobs = np.zeros((len(self._targets), count), np.float32)

    def rows(self, start: int, end: int) -> range:
        """The positions from `start` to `end` after which another token of the prompt comes."""
        return range(start, max(start, min(end, len(self._targets))))

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Takes the logits [R, V] after R positions, the first of them `start`, in any float
        dtype. Raises SequenceFault for logits that are no distribution.
        """
        part = slice(start, start + len(logits))
        logprobs = logits.float().log_softmax(dim=-1).clamp_(min=LEAST_LOGPROB)
        targets = to_device(self._targets[part], np.int64, logits.device)
        self._logprobs[part] = logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        if not np.isfinite(self._logprobs[part]).all():
            raise SequenceFault("the model's logits for a token of the prompt hold NaN or infinity")
        if count := self._top_ids.shape[1]:
            top, ids = logprobs.topk(count)
            self._top_logprobs[part] = top.cpu().numpy()
            self._top_ids[part] = ids.cpu().numpy()

    def result(self) -> PromptLogprobs:
        """Returns what was collected. Call it when the whole prompt has been computed."""
        return PromptLogprobs(
            array("f", self._logprobs.tobytes()),
            array("i", self._top_ids.tobytes()),
            array("f", self._top_logprobs.tobytes()),
        )
