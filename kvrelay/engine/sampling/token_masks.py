"""The tokens that guidance allows, for a whole batch at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.base.device import to_device
from kvrelay.engine.sampling.grammar_time import CALL_S, MASK_S, Spending, too_slow
from kvrelay.errors import InvalidArgument

if TYPE_CHECKING:
    from kvrelay.engine.sampling.sampler import SampleRequest


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of the rows with guidance: bit i of word w of a row's mask is token 32 w + i."""

    rows: list[int]
    # [len(rows), width]
    words: NDArray[np.int32]
    # Errors of rows. Such a row's mask allows every token, and its sample does not count.
    failed: dict[int, InvalidArgument]

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits [R, V] with minus infinity for tokens that are not allowed. The input and
        the rows without guidance are not modified. A row with a NaN or infinity stays, and fails.
        """
        whole = len(self.rows) == len(logits)
        index = to_device(self.rows, np.int64, logits.device)
        guided = logits if whole else logits[index]
        banned = self._banned(logits.shape[1], logits.device)
        banned &= guided.amax(dim=1, keepdim=True).isfinite()
        masked = torch.where(banned, -torch.inf, guided)
        return masked if whole else logits.index_copy(0, index, masked)

    def _banned(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Booleans [len(rows), vocab_size]."""
        if device.type == "cpu":
            bits = np.unpackbits(
                self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little"
            )
            return torch.from_numpy(bits == 0)
        return unpacked(to_device(self.words, np.int32, device))[:, :vocab_size] == 0


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Bits [N, 32 W] of int32 words [N, W], lowest bit first."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return words[:, :, None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)


def token_masks(requests: Sequence[SampleRequest]) -> TokenMasks | None:
    """Computes the masks of the requests with a matcher; None if there are none.

    Adjacent requests with the same matcher are one sequence with 0, 1, 2, … drafts.
    """
    rows = [row for row, request in enumerate(requests) if request.matcher is not None]
    if not rows:
        return None
    matchers = [request.matcher for request in requests if request.matcher is not None]
    words = np.full((len(rows), matchers[0].width), -1, np.int32)
    failed: dict[int, InvalidArgument] = {}
    masks = Counter(matcher.allowance for matcher in matchers)
    spent = {one: Spending(one, CALL_S + MASK_S * count) for one, count in masks.items()}
    for matcher, group in groupby(range(len(rows)), key=matchers.__getitem__):
        places = list(group)
        last = requests[rows[places[-1]]]
        began = time.thread_time()
        fault = matcher.fill(words[places[0] : places[-1] + 1], last.token_ids, len(places) - 1)
        seconds = time.thread_time() - began
        # Charged at once, so that the sequences after it do not take what is gone.
        granted = spent[matcher.allowance].add(seconds)
        if fault is None and not granted and seconds > MASK_S * len(places):
            fault = 0, too_slow(seconds / len(places))
        if fault is not None:
            place, error = fault
            failed[rows[places[place]]] = error
            words[places[place]] = -1
    return TokenMasks(rows, words, failed)
