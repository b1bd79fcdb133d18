"""The log-probabilities of a prompt's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.types.requests import PromptLogprobs

Array = npt.NDArray[Any]


class PromptScores:
    """Collects the log-probabilities of a prompt's tokens while its chunks are computed, in any
    order and also if a chunk is computed again. Without torch, since schedulers hold it.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        """count: number of likeliest tokens at each place."""
        self.count = count
        self._targets = np.asarray(prompt[1:], np.int64)
        self._logprobs = np.zeros(len(self._targets), np.float32)
        self._top_ids = np.zeros((len(self._targets), count), np.int32)
        self._top_logprobs = np.zeros((len(self._targets), count), np.float32)

    def rows(self, start: int, end: int) -> range:
        """The positions from `start` to `end` after which another token of the prompt comes."""
        return range(start, max(start, min(end, len(self._targets))))

    def targets(self, rows: range) -> Array:
        """The tokens that come after these positions: int64 [R]."""
        return self._targets[rows.start : rows.stop]

    def add(self, rows: range, logprobs: Array, top_ids: Array, top_logprobs: Array) -> None:
        """Takes the log-probabilities of the targets [R], and the likeliest tokens with theirs
        [R, count], most likely first.
        """
        part = slice(rows.start, rows.stop)
        self._logprobs[part] = logprobs
        self._top_ids[part] = top_ids
        self._top_logprobs[part] = top_logprobs

    def result(self) -> PromptLogprobs:
        """Returns what was collected. Call it when the whole prompt has been computed."""
        return PromptLogprobs(
            array("f", self._logprobs.tobytes()),
            array("i", self._top_ids.tobytes()),
            array("f", self._top_logprobs.tobytes()),
        )
