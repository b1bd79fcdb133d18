"""The numbers of a step in one buffer, so that one copy takes them to the device."""

from __future__ import annotations

import torch

from kvrelay.engine.base.step_input import Step


class PackedStep:
    """Views of one int64 buffer: token_ids [T], positions [T], slots [T], rows [R].

    A slot is block * block_size + offset: where a new token's KV goes.
    """

    def __init__(self, buffer: torch.Tensor, num_tokens: int) -> None:
        self.buffer = buffer
        self._num_tokens = num_tokens
        num_rows = len(buffer) - 3 * num_tokens
        self.token_ids, self.positions, self.slots, self.rows = torch.split(
            buffer, [num_tokens, num_tokens, num_tokens, num_rows]
        )

    @classmethod
    def on_host(cls, step: Step, block_size: int, *, pinned: bool) -> PackedStep:
        """Copies the step's numbers to a new buffer in host memory.

        With `pinned`, a GPU copies from the buffer asynchronously. torch does not reuse the memory
        before the copy is complete.
        """
        size = 3 * len(step.token_ids) + len(step.rows)
        packed = cls(torch.empty(size, dtype=torch.int64, pin_memory=pinned), len(step.token_ids))
        packed.token_ids.numpy()[:] = step.token_ids
        packed.positions.numpy()[:] = step.positions
        packed.slots.numpy()[:] = step.slots(block_size)
        packed.rows.numpy()[:] = step.rows
        return packed

    def on(self, device: torch.device) -> PackedStep:
        """An asynchronous copy on the device."""
        return PackedStep(self.buffer.to(device, non_blocking=True), self._num_tokens)


def batch_bucket(count: int) -> int:
    """Batch size of the captured step that runs `count` sequences: 1, 2, 4, 8, then multiples of
    8.
    """
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
