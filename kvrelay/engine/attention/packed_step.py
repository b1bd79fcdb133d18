"""The numbers of a step in one buffer, so that one copy takes them to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.base.step_input import Step


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Sizes of a step: T tokens, R rows of logits, P parts, and W blocks in the longest block
    table.

    W is 0 if the step has no tables.
    """

    tokens: int
    rows: int
    parts: int
    width: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each view in the buffer: token_ids, positions, slots, rows, tables."""
        return [self.tokens, self.tokens, self.tokens, self.rows, self.parts * self.width]


class PackedStep:
    """Views of one int64 buffer: token_ids [T], positions [T], slots [T], rows [R], tables [P, W].

    A slot is block * block_size + offset: where a new token's KV goes. A table is padded with its
    last block.
    """

    def __init__(self, buffer: torch.Tensor, shape: PackedShape) -> None:
        self.buffer = buffer
        self.shape = shape
        self.token_ids, self.positions, self.slots, self.rows, tables = torch.split(
            buffer, shape.sizes
        )
        self.tables = tables.view(shape.parts, shape.width)

    @classmethod
    def on_host(
        cls, step: Step, shape: PackedShape, block_size: int, *, pinned: bool
    ) -> PackedStep:
        """Copies the step's numbers to a new buffer in host memory.

        With `pinned`, a GPU copies from the buffer asynchronously. torch does not reuse the memory
        before the copy is complete.
        """
        packed = cls(torch.empty(sum(shape.sizes), dtype=torch.int64, pin_memory=pinned), shape)
        packed.token_ids.numpy()[:] = step.token_ids
        packed.positions.numpy()[:] = step.positions
        packed.slots.numpy()[:] = step.slots(block_size)
        packed.rows.numpy()[:] = step.rows
        if shape.width:
            for table, part in zip(packed.tables.numpy(), step.parts, strict=True):
                last = (part.end - 1) // block_size
                table[: last + 1] = part.blocks[: last + 1]
                table[last + 1 :] = part.blocks[last]
        return packed

    def on(self, device: torch.device) -> PackedStep:
        """An asynchronous copy on the device."""
        return PackedStep(self.buffer.to(device, non_blocking=True), self.shape)


def batch_bucket(count: int) -> int:
    """Batch size of the captured step that runs `count` sequences: 1, 2, 4, 8, then multiples of
    8.
    """
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def width_bucket(blocks: int) -> int:
    """Table width of the captured step that holds `blocks`: a power of two, or three quarters of a
    power of two. 0 if there are no blocks.
    """
    if not blocks:
        return 0
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if blocks <= power * 3 // 4 else power
