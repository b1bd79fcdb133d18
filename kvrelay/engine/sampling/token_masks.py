"""The tokens that guidance allows, for a whole batch at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.base.device import to_device
from kvrelay.engine.sampling.grammar_time import CALL_S, MASK_S, GrammarTime, too_slow
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
    # Of each tenant: for each sequence its first row, its number of masks and their time.
    spent: defaultdict[GrammarTime, list[tuple[int, int, float]]] = defaultdict(list)
    for matcher, group in groupby(range(len(rows)), key=matchers.__getitem__):
        places = list(group)
        last = requests[rows[places[-1]]]
        began = time.thread_time()
        fault = matcher.fill(words[places[0] : places[-1] + 1], last.token_ids, len(places) - 1)
        seconds = time.thread_time() - began
        if fault is None:
            spent[matcher.allowance].append((places[0], len(places), seconds))
        else:
            place, error = fault
            failed[places[place]] = error
    for allowance, sequences in spent.items():
        for first, seconds in _over(allowance, sequences):
            failed[first] = too_slow(seconds)
    for place in failed:
        words[place] = -1
    return TokenMasks(rows, words, {rows[place]: error for place, error in failed.items()})


def _over(
    allowance: GrammarTime, sequences: Sequence[tuple[int, int, float]]
) -> Iterator[tuple[int, float]]:
    """Charges a tenant for the masks of a step. If they took more than the tenant may take, yields
    the sequences that took more than usual: the first row of each, and its seconds for a mask.
    """
    masks = sum(count for _, count, _ in sequences)
    usual = MASK_S + CALL_S / masks
    if not allowance.take(sum(seconds for *_, seconds in sequences) - usual * masks):
        for first, count, seconds in sequences:
            if seconds > usual * count:
                yield first, seconds / count
