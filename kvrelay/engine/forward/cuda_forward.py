"""A forward pass on a GPU: flashinfer's attention, and CUDA graphs for decode steps. The host fills
one buffer and starts the computation without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit, FlashInfer, Room
from kvrelay.engine.attention.packed_step import PackedStep, batch_bucket
from kvrelay.engine.attention.paged_attention import Batch
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.capturable import NotCapturable
from kvrelay.engine.forward.check_steps import ComparedBatch, explained, trial_steps
from kvrelay.engine.forward.cuda_graph import CudaGraphs, Graph, Recorder
from kvrelay.engine.forward.torch_forward import TorchForward

# Blocks at the end of the pool that no sequence owns. The padding sequences of a captured step
# write there.
SCRATCH_BLOCKS = 1
# Sequences. In larger steps the kernels take longer than their launches, so a graph saves nothing.
MAX_CAPTURED = 256


class Decoding(Protocol):
    """The attention of steps of one new token per sequence, which read their numbers from the same
    tensors each time.
    """

    def update(self, parts: Sequence[Part]) -> None:
        """Takes the next step's parts, for data that those tensors do not hold. Called before each
        step.
        """

    def batch(self) -> Batch:
        """A batch for one run of the model's Python code."""
        ...


class PagedAttention(Protocol):
    """An implementation of attention over paged KV on a GPU."""

    def ragged(self, inputs: PackedStep, step: Step) -> Batch:
        """The batch of a step with any number of new tokens per sequence."""
        ...

    def decoding(self, inputs: PackedStep) -> Decoding:
        """The attention of captured steps that read `inputs`."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: PackedStep
    decoding: Decoding
    graph: Graph


class CudaForward:
    """Runs steps on a GPU. `kv` ends with SCRATCH_BLOCKS that no sequence owns.

    Decode steps are captured by size before the worker serves, and replayed as a whole. Steps of
    other kinds and sizes run the model's Python code.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KvPool,
        max_model_len: int,
        attention: PagedAttention,
        recorder: Recorder,
    ) -> None:
        """Compares `attention` with plain torch operators in each layer, while no block is in use.
        Raises DoesNotFit if they differ by more than rounding explains, or if it fails.
        """
        self._model = model
        self._kv = kv
        self._attention = attention
        self._recorder = recorder
        # By number of sequences.
        self._captured: dict[int, _Captured] = {}
        # Why some or all decode steps are not captured, or empty.
        self.not_captured = ""
        with torch.inference_mode():
            for step in trial_steps(self._free_blocks, kv.layout.block_size, max_model_len):
                self._compare(step)

    @classmethod
    def on_gpu(cls, model: PreTrainedModel, kv: KvPool, max_model_len: int) -> CudaForward:
        """A forward pass with flashinfer and CUDA graphs on the model's GPU. Raises DoesNotFit."""
        room = Room(
            query_heads=model.config.get_text_config().num_attention_heads,
            processors=torch.cuda.get_device_properties(model.device).multi_processor_count,
            sequences=MAX_CAPTURED,
            blocks=MAX_CAPTURED * kv.layout.blocks_for(max_model_len),
        )
        return cls(model, kv, max_model_len, FlashInfer(kv, room), CudaGraphs(model.device))

    def __call__(self, step: Step) -> torch.Tensor:
        """Stores the KV of all new tokens. Returns logits [len(step.rows), vocab_size], valid until
        the next call.

        The step is complete when the logits have been read or, if there are none, when this
        returns.
        """
        captured = self._captured_for(step)
        logits = self._run(step) if captured is None else self._replay(captured, step)
        if not step.rows and logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        return logits

    @torch.inference_mode()
    def capture_decode_steps(self, most: int) -> None:
        """Captures decode steps of up to `most` sequences, the largest first, so that the smaller
        ones fit into the memory that they share. No block may be in use. A size for which memory is
        missing is left out.
        """
        self.not_captured = ""
        sizes = sorted({batch_bucket(count) for count in range(1, min(most, MAX_CAPTURED) + 1)})
        for size in reversed(sizes):
            try:
                self._captured[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                self.not_captured = f"steps of {size} sequences: {error}"
            except NotCapturable as reason:
                self._captured.clear()
                self.not_captured = str(reason)
                return

    def _captured_for(self, step: Step) -> _Captured | None:
        fits = step.decodes and len(step.rows) <= len(step.parts)
        return self._captured.get(batch_bucket(len(step.parts))) if fits else None

    def _run(self, step: Step) -> torch.Tensor:
        inputs = self._packed(step).on(self._model.device)
        return self._forward(inputs, self._attention.ragged(inputs, step))

    def _replay(self, captured: _Captured, step: Step) -> torch.Tensor:
        padded = step.padded(len(captured.inputs.token_ids), block=self._free_blocks)
        captured.inputs.buffer.copy_(self._packed(padded).buffer, non_blocking=True)
        captured.decoding.update(padded.parts)
        captured.graph.replay()
        return captured.graph.output[: len(step.rows)]

    def _capture(self, size: int) -> _Captured:
        """Raises NotCapturable, also if a replay differs from the model's code."""
        first, second = (_decode_step(size, self._free_blocks, token) for token in (1, 2))
        inputs = self._packed(first).on(self._model.device)
        decoding = self._attention.decoding(inputs)
        decoding.update(first.parts)
        graph = self._recorder.record(lambda: self._forward(inputs, decoding.batch()))
        captured = _Captured(inputs, decoding, graph)
        wanted = self._run(second).clone()
        if not explained(self._replay(captured, second), wanted):
            raise NotCapturable("a captured step does not give what the model gives")
        return captured

    def _compare(self, step: Step) -> None:
        """Raises DoesNotFit."""
        inputs = self._packed(step).on(self._model.device)
        reference = TorchForward(self._model, self._kv).batch(step)
        try:
            batch = ComparedBatch(self._attention.ragged(inputs, step), reference)
            self._forward(inputs, batch)
        except (DoesNotFit, torch.OutOfMemoryError):
            raise
        # flashinfer compiles on first use, and any exception of that is the reason.
        except Exception as error:
            raise DoesNotFit(f"flashinfer fails on this device: {error!r:.300}") from error

    def _forward(self, inputs: PackedStep, batch: Batch) -> torch.Tensor:
        output = self._model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=inputs.rows,
            ragged_batch=batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _packed(self, step: Step) -> PackedStep:
        pinned = self._model.device.type == "cuda"
        return PackedStep.on_host(step, self._kv.layout.block_size, pinned=pinned)

    @property
    def _free_blocks(self) -> int:
        """Blocks before the scratch block, which is the next."""
        return self._kv.num_blocks - SCRATCH_BLOCKS


def _decode_step(size: int, num_blocks: int, token: int) -> Step:
    """First tokens of `size` sequences. Those that share a block, where there are too few, have the
    same token.
    """
    blocks = [place % num_blocks for place in range(size)]
    parts = [Part(row, 1, 0, (block,)) for row, block in enumerate(blocks)]
    return Step([(token + block) % 2 + 1 for block in blocks], parts, range(size))
