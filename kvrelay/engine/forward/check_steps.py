"""What a way through a model is tried on before it serves, while no block is anybody's."""

from __future__ import annotations

import torch

from kvrelay.engine.base.step_input import Part, Step


def trial_steps(num_blocks: int, block_size: int, max_model_len: int) -> tuple[Step, Step, Step]:
    """A prompt over some blocks, which do not ascend, then two unlike tokens in the place of its
    last one: for three sequences, which are the same."""
    blocks = range(num_blocks)[::-1]
    length = min(2 * block_size + 3, num_blocks * block_size, max_model_len)
    prompt = Step([1 + i % 2 for i in range(length)], [Part(0, length, 0, blocks)], [length - 1])
    first, second = (
        Step([token] * 3, [Part(i, 1, length - 1, blocks) for i in range(3)], range(3))
        for token in (1, 2)
    )
    return prompt, first, second


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether each row of logits is as far from the other as rounding explains, that of a deep
    model in 16 bits included: in the 2-norm, since single logits may differ by more."""
    bound = tolerance(wanted.dtype)
    found, wanted = found.float(), wanted.float()
    return bool(((found - wanted).norm(dim=-1) <= bound * wanted.norm(dim=-1)).all())


def tolerance(dtype: torch.dtype) -> float:
    """The share of a row's 2-norm that rounding in `dtype` explains."""
    return float(max(1e-3, 16 * torch.finfo(dtype).eps))
