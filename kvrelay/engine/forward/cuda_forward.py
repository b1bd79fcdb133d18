"""A forward pass on a GPU. The host fills one buffer and starts the computation without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit, FlashInfer, Room
from kvrelay.engine.attention.packed_step import PackedShape, PackedStep, batch_bucket, width_bucket
from kvrelay.engine.attention.paged_attention import Batch
from kvrelay.engine.attention.sdpa import Sdpa
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.capturable import NotCapturable
from kvrelay.engine.forward.check_steps import alike, trial_steps
from kvrelay.engine.forward.cuda_graph import CudaGraphs, Graph, Recorder

# Blocks at the end of the pool that no sequence owns. The padding sequences of a captured step
# write there.
SCRATCH_BLOCKS = 1
# Sequences. In larger steps the kernels take longer than their launches, so a graph saves nothing.
MAX_RECORDED = 256
# Shapes that are kept; a new shape evicts the oldest.
MAX_GRAPHS = 64


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

    def width(self, step: Step) -> int:
        """Blocks that the tables among the step's inputs must hold."""
        ...

    def ragged(self, inputs: PackedStep, step: Step) -> Batch:
        """The batch of a step with any number of new tokens per sequence."""
        ...

    def decoding(self, inputs: PackedStep) -> Decoding:
        """The attention of captured steps that read `inputs`."""
        ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: PackedStep
    decoding: Decoding
    graph: Graph


class CudaForward:
    """Runs steps on a GPU. `kv` ends with SCRATCH_BLOCKS that no sequence owns.

    Steps of one new token per sequence are captured by size, rounded up, and replayed as a whole.
    Capture and flashinfer's kernels are checked on each model before it serves.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KvPool,
        max_model_len: int,
        recorder: Recorder,
        flashinfer: Callable[[], PagedAttention] | None,
    ) -> None:
        """Checks flashinfer and capture. `flashinfer` makes its attention or raises DoesNotFit;
        None disables flashinfer.
        """
        self._model = model
        self._kv = kv
        self._recorder = recorder
        self._recorded: dict[PackedShape, _Recorded] = {}
        self._attention: PagedAttention = Sdpa(kv)
        # The reason why flashinfer is not used, or empty.
        self.without_flashinfer = "it was not asked for"
        # The reason why steps are not captured, or empty.
        self.not_captured = ""
        trial = trial_steps(kv.num_blocks - SCRATCH_BLOCKS, kv.layout.block_size, max_model_len)
        with torch.inference_mode():
            if flashinfer is not None:
                self.without_flashinfer = self._try_flashinfer(flashinfer, trial)
            self._try_capture(trial)

    @classmethod
    def on_gpu(
        cls, model: PreTrainedModel, kv: KvPool, max_model_len: int, *, flashinfer: bool
    ) -> CudaForward:
        """A forward pass with CUDA graphs on the model's GPU, with flashinfer if it is wanted and
        fits.
        """
        room = Room(
            query_heads=model.config.get_text_config().num_attention_heads,
            processors=torch.cuda.get_device_properties(model.device).multi_processor_count,
            sequences=MAX_RECORDED,
            blocks=MAX_RECORDED * kv.layout.blocks_for(max_model_len),
        )
        recorder = CudaGraphs(model.device)
        return cls(
            model,
            kv,
            max_model_len,
            recorder,
            (lambda: FlashInfer(kv, room)) if flashinfer else None,
        )

    def __call__(self, step: Step) -> torch.Tensor:
        """Stores the KV of all new tokens. Returns logits [len(step.rows), vocab_size], valid until
        the next call.

        The step is complete when the logits have been read or, if there are none, when this
        returns.
        """
        logits = self._decode(step) if self._is_recorded(step) else self._run(step)
        if not step.rows and logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        return logits

    def _is_recorded(self, step: Step) -> bool:
        fits = len(step.rows) <= len(step.parts) <= MAX_RECORDED
        return step.decodes and fits and not self.not_captured

    def _run(self, step: Step) -> torch.Tensor:
        step = step.decoding_first()
        shape = PackedShape(
            len(step.token_ids), len(step.rows), len(step.parts), self._attention.width(step)
        )
        inputs = self._on_host(step, shape).on(self._model.device)
        return self._forward(inputs, self._attention.ragged(inputs, step))

    def _decode(self, step: Step) -> torch.Tensor:
        size = batch_bucket(len(step.parts))
        padded = step.padded(size, block=self._kv.num_blocks - SCRATCH_BLOCKS)
        shape = PackedShape(size, size, size, width_bucket(self._attention.width(padded)))
        packed = self._on_host(padded, shape)
        recorded = self._recorded.get(shape)
        if recorded is None:
            try:
                recorded = self._record(packed, padded)
            except (NotCapturable, torch.OutOfMemoryError) as reason:
                # Raises if the step is at fault, not the model. Capture then stays enabled.
                logits = self._run(step)
                self.not_captured = str(reason)
                return logits
            if len(self._recorded) >= MAX_GRAPHS:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[shape] = recorded
        else:
            recorded.inputs.buffer.copy_(packed.buffer, non_blocking=True)
            recorded.decoding.update(padded.parts)
        recorded.graph.replay()
        return recorded.graph.output[: len(step.rows)]

    def _record(self, packed: PackedStep, step: Step) -> _Recorded:
        inputs = packed.on(self._model.device)
        decoding = self._attention.decoding(inputs)
        decoding.update(step.parts)
        return _Recorded(
            inputs, decoding, self._recorder.record(lambda: self._forward(inputs, decoding.batch()))
        )

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

    def _on_host(self, step: Step, shape: PackedShape) -> PackedStep:
        pinned = self._model.device.type == "cuda"
        return PackedStep.on_host(step, shape, self._kv.layout.block_size, pinned=pinned)

    def _try_flashinfer(
        self, flashinfer: Callable[[], PagedAttention], trial: Sequence[Step]
    ) -> str:
        """Switches to flashinfer and returns an empty string, or keeps torch's attention and
        returns the reason.
        """
        sdpa = self._attention
        wanted = [self._run(step).clone() for step in trial]
        try:
            self._attention = flashinfer()
            if all(
                alike(self._run(step), logits) for step, logits in zip(trial, wanted, strict=True)
            ):
                return ""
            reason = "flashinfer does not give what torch gives"
        except DoesNotFit as misfit:
            reason = str(misfit)
        # flashinfer compiles on first use. Any exception of that is the reason.
        except Exception as error:  # noqa: BLE001
            reason = f"flashinfer fails on this device: {error!r}"
        self._attention = sdpa
        return reason

    def _try_capture(self, trial: Sequence[Step]) -> None:
        """Captures one step and replays another; disables capture if the replay differs from the
        model.
        """
        *_, first, second = trial
        wanted = self._run(second).clone()
        self._decode(first)
        if not self.not_captured and not alike(self._decode(second), wanted):
            self.not_captured = "a recorded step does not give what the model gives"
            self._recorded.clear()
