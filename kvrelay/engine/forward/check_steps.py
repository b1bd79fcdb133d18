"""Steps on which an optimised forward pass is checked before it serves, while no block is in
use.
"""

from __future__ import annotations

from typing import Any

import torch

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit
from kvrelay.engine.attention.paged_attention import Batch
from kvrelay.engine.base.step_input import Part, Step

# A lower bound for the norm of a row, since a row of zeros has norm 0.
_NOTHING = 1e-30


def trial_steps(num_blocks: int, block_size: int, max_model_len: int) -> list[Step]:
    """A prompt over blocks that do not ascend; then the second half of it as a chunk, between two
    sequences that decode; then the last token in three identical sequences.
    """
    blocks = range(num_blocks)[::-1]
    length = min(2 * block_size + 3, num_blocks * block_size, max_model_len)
    tokens = [1 + i % 2 for i in range(length)]
    half = length // 2
    last = length - 1
    mixed = [Part(0, 1, last, blocks), Part(1, length - half, half, blocks)]
    mixed.append(Part(1 + length - half, 1, last, blocks))
    return [
        Step(tokens, [Part(0, length, 0, blocks)], [last]),
        Step([tokens[last], *tokens[half:], tokens[last]], mixed, range(2)),
        Step([2] * 3, [Part(row, 1, last, blocks) for row in range(3)], range(3)),
    ]


class ComparedBatch:
    """A batch that computes attention in two ways in each layer, from the same queries and KV."""

    def __init__(self, used: Batch, reference: Batch) -> None:
        self._used = used
        self._reference = reference

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """See `paged_attention.Batch`. Returns what the reference gives. Raises DoesNotFit if the
        two differ by more than rounding explains.
        """
        found = self._used.attend(layer_index, query, key, value, **options)
        wanted = self._reference.attend(layer_index, query, key, value, **options)
        if not explained(found, wanted):
            raise DoesNotFit(
                f"flashinfer does not give in layer {layer_index} what torch's operators give"
            )
        return wanted


def explained(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if two ways to round the results of the same inputs explain the difference of each row,
    in the 2-norm. NaN is not explained.
    """
    bound = max(1e-5, 4 * torch.finfo(wanted.dtype).eps)
    return bool((relative_errors(found, wanted) <= bound).all())


def relative_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The difference of each row, [..., N] -> [...], in the 2-norm and relative to the norm of the
    wanted row. In float32.
    """
    found, wanted = found.float(), wanted.float()
    norm = wanted.norm(dim=-1).clamp_min(_NOTHING)
    errors: torch.Tensor = (found - wanted).norm(dim=-1) / norm
    return errors
