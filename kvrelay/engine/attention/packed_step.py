"""A step's numbers in one piece of memory, so that one copy takes them to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.engine.base.step_input import Step


@dataclass(frozen=True, slots=True)
class PackedShape:
    """tokens T, rows of logits R, parts P, and blocks W of the longest block table; W 0 leaves the
    tables out.
    """

    tokens: int
    rows: int
    parts: int
    width: int

    @property
    def sizes(self) -> list[int]:
        return [self.tokens, self.tokens, self.tokens, self.rows, self.parts * self.width]


class PackedStep:
    """Views of one int64 buffer: token_ids [T], positions [T], slots [T], rows [R], tables [P, W].

    slots: block * block_size + offset, where each new token's KV goes. A table is filled up with
    its last block.
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
        """The step's numbers; in memory that a GPU copies from on its own where it is pinned, which
        torch does not give out again before the copy is over."""
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
        """A copy on the device, which nobody waits for."""
        return PackedStep(self.buffer.to(device, non_blocking=True), self.shape)


def batch_bucket(count: int) -> int:
    """Sequences that a recorded step has room for: 1, 2, 4, 8, and from there every eighth
    number.
    """
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def width_bucket(blocks: int) -> int:
    """Blocks that a recorded step's tables have room for: a power of two, three quarters of one, or
    none.
    """
    if not blocks:
        return 0
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if blocks <= power * 3 // 4 else power
