"""Attention on a GPU by torch operators. Decoding sequences are padded to the longest; prompt
chunks are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.attention.packed_step import PackedStep
from kvrelay.engine.attention.padded_parts import PaddedParts
from kvrelay.engine.attention.ragged_batch import RaggedBatch, RaggedPart, SequencePart
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step


class Sdpa:
    """Attention by torch's scaled_dot_product_attention on block tables on the device."""

    def __init__(self, kv: KvPool) -> None:
        self._kv = kv

    def width(self, step: Step) -> int:
        """Blocks that the step's tables must hold."""
        return max(self._kv.layout.blocks_for(part.end) for part in step.parts)

    def ragged(self, inputs: PackedStep, step: Step) -> RaggedBatch:
        """Batches the leading parts with one new token. Later parts are computed one by one, so a
        step with single tokens first is faster.
        """
        parts: list[RaggedPart] = []
        singles = next((i for i, part in enumerate(step.parts) if part.new > 1), len(step.parts))
        if singles:
            width = max(self._kv.layout.blocks_for(part.end) for part in step.parts[:singles])
            tables, positions = inputs.tables[:singles, :width], inputs.positions[:singles]
            parts.append(PaddedParts(tables, positions, self._kv.layout.block_size))
        for i, part in enumerate(step.parts[singles:], singles):
            parts.append(
                SequencePart.of(part, inputs.tables[i, : self._kv.layout.blocks_for(part.end)])
            )
        return RaggedBatch(self._kv, inputs.slots, parts, step.on_layer)

    def decoding(self, inputs: PackedStep) -> SdpaDecoding:
        """The attention of a captured step of one new token per sequence. It reads `inputs`."""
        return SdpaDecoding(self._kv, inputs)


class SdpaDecoding:
    """Attention of a captured decode step. The inputs hold everything that it reads."""

    def __init__(self, kv: KvPool, inputs: PackedStep) -> None:
        self._kv = kv
        self._inputs = inputs

    def update(self, parts: Sequence[Part]) -> None:
        """Does nothing: `batch` reads the inputs of the current step."""

    def batch(self) -> RaggedBatch:
        """A batch for one run of the model. Its first layer computes the slots of the keys."""
        parts = PaddedParts(self._inputs.tables, self._inputs.positions, self._kv.layout.block_size)
        return RaggedBatch(self._kv, self._inputs.slots, [parts])
