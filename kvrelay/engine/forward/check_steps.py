"""Steps on which an optimised forward pass is checked before it serves, while no block is in
use.
"""

from __future__ import annotations

import torch

from kvrelay.engine.base.step_input import Part, Step


def trial_steps(num_blocks: int, block_size: int, max_model_len: int) -> tuple[Step, Step, Step]:
    """A prompt over non-ascending blocks, then two different tokens in the position of its last
    one, each in a step of three identical sequences.
    """
    blocks = range(num_blocks)[::-1]
    length = min(2 * block_size + 3, num_blocks * block_size, max_model_len)
    prompt = Step([1 + i % 2 for i in range(length)], [Part(0, length, 0, blocks)], [length - 1])
    first, second = (
        Step([token] * 3, [Part(i, 1, length - 1, blocks) for i in range(3)], range(3))
        for token in (1, 2)
    )
    return prompt, first, second


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """True if rounding explains the difference of each row of logits, for deep models in 16 bits
    too.

    The rows are compared in the 2-norm, since single logits may differ by more.
    """
    bound = tolerance(wanted.dtype)
    found, wanted = found.float(), wanted.float()
    return bool(((found - wanted).norm(dim=-1) <= bound * wanted.norm(dim=-1)).all())


def tolerance(dtype: torch.dtype) -> float:
    """The relative error in the 2-norm of a row that rounding in `dtype` explains."""
    return float(max(1e-3, 16 * torch.finfo(dtype).eps))
