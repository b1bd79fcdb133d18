"""Attention on a GPU by torch's operators: decoding sequences padded to the longest, chunks of
prompts one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.attention.packed_step import PackedStep
from kvrelay.engine.attention.padded_parts import PaddedParts
from kvrelay.engine.attention.ragged_batch import RaggedBatch, RaggedPart, SequencePart
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step


class Sdpa:
    def __init__(self, kv: KvPool) -> None:
        self._kv = kv

    def width(self, step: Step) -> int:
        """Blocks that the step's tables must have room for."""
        return max(self._kv.layout.blocks_for(part.end) for part in step.parts)

    def ragged(self, inputs: PackedStep, step: Step) -> RaggedBatch:
        """Sequences with one new token come first, or they are computed one by one like the
        others.
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
        return SdpaDecoding(self._kv, inputs)


class SdpaDecoding:
    """All that it needs lies in the inputs."""

    def __init__(self, kv: KvPool, inputs: PackedStep) -> None:
        self._kv = kv
        self._inputs = inputs

    def update(self, parts: Sequence[Part]) -> None:
        pass

    def batch(self) -> RaggedBatch:
        """For one run through the model: the first layer finds out where the keys lie."""
        parts = PaddedParts(self._inputs.tables, self._inputs.positions, self._kv.layout.block_size)
        return RaggedBatch(self._kv, self._inputs.slots, [parts])
