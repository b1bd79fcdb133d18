"""A forward pass by the native kernels. Steps of a known shape run without the model's Python
code.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.capturable import NotCapturable
from kvrelay.engine.forward.captured_graph import CapturedForward
from kvrelay.engine.native.batch import PagedBatch
from kvrelay.engine.native.program import BufferPool

# Shapes that are kept. A new shape takes the place of the least used one only if it was met more
# than twice as often.
MAX_CAPTURED = 64
# Steps of a shape before it is captured. A capture takes as long as the Python code of about four
# steps, so a shape that does not come back costs nothing, and any other at most twice the least.
CAPTURED_AFTER = 4
# Steps after which the counts of use are halved, so that they follow the load.
HALVED_AFTER = 4096

# New tokens, rows of logits, and whether any row has an adapter.
Shape = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """int64 tensors at fixed addresses, which captured calls read."""

    # [1, T]
    token_ids: torch.Tensor
    positions: torch.Tensor  # [1, T]
    rows: torch.Tensor  # [R]

    @classmethod
    def of(cls, step: Step) -> _Inputs:
        return cls(_tensor(step.token_ids)[None], _tensor(step.positions)[None], _tensor(step.rows))

    def fill(self, step: Step) -> None:
        self.token_ids[0].copy_(_tensor(step.token_ids))
        self.positions[0].copy_(_tensor(step.positions))
        self.rows.copy_(_tensor(step.rows))


def _tensor(values: Sequence[int]) -> torch.Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", values), dtype=torch.int64)


class NativeForward:
    """Runs steps on the native kernels. `model` must have gone through `use_kernels`, and `kv` must
    be in the kernels' order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KvPool,
        adapters: StepAdapters | None = None,
        *,
        watched: bool = False,
    ) -> None:
        """`adapters` is read by the layers that adapters change. Steps without adapters have
        captured graphs of their own, which do not contain the updates. watched: whether captured
        steps tell the queries of parts that ask for them.
        """
        self._model = model
        self._adapters = adapters or StepAdapters()
        self._batch = PagedBatch(kv, watched=watched)
        self._pool = BufferPool()
        self._captured: dict[Shape, tuple[_Inputs, CapturedForward]] = {}
        # Recent steps of each shape.
        self._met: Counter[Shape] = Counter()
        self._steps = 0
        # The reason why steps are not captured, or empty.
        self.not_captured = ""
        self._try_capture(kv.num_blocks)

    def __call__(self, step: Step) -> torch.Tensor:
        """Stores the KV of all new tokens. Returns logits [len(step.rows), vocab_size], valid until
        the next call.
        """
        adapted = self._adapters.update(step.parts)
        shape = len(step.token_ids), len(step.rows), adapted
        if self.not_captured:
            return self._run(step)
        self._count(shape)
        if shape in self._captured:
            inputs, captured = self._captured[shape]
            inputs.fill(step)
            self._batch.update(step.parts, step.on_layer)
            return captured.run()
        # What takes the queries would be captured with the step.
        watched = any(part.queries is not None for part in step.parts)
        return self._capture(step) if self._pays(shape) and not watched else self._run(step)

    @torch.inference_mode()
    def capture_decode_steps(self, most: int, seconds: float) -> None:
        """Captures steps of 1, 2, ... sequences with one new token each, up to `most` sequences, as
        far as the time allows. Overwrites the first block.
        """
        end = time.monotonic() + seconds
        for count in range(1, min(most, MAX_CAPTURED // 2) + 1):
            if self.not_captured or time.monotonic() >= end:
                return
            parts = [Part(row, 1, 0, [0]) for row in range(count)]
            self._capture(Step([0] * count, parts, range(count)))

    def _count(self, shape: Shape) -> None:
        self._met[shape] += 1
        self._steps += 1
        if self._steps % HALVED_AFTER == 0:
            self._met = Counter({one: count // 2 for one, count in self._met.items() if count > 1})

    def _pays(self, shape: Shape) -> bool:
        """Whether to capture the shape."""
        least = CAPTURED_AFTER
        if len(self._captured) >= MAX_CAPTURED:
            least = max(least, 2 * self._met[self._least_used()])
        return self._met[shape] > least

    def _least_used(self) -> Shape:
        return min(self._captured, key=lambda one: self._met[one])

    def _run(self, step: Step) -> torch.Tensor:
        self._batch.update(step.parts, step.on_layer)
        return self._forward(_Inputs.of(step))

    def _capture(self, step: Step) -> torch.Tensor:
        """Computes the step and captures it. If the model cannot be captured, sets `not_captured`
        and runs the step in Python.
        """
        inputs = _Inputs.of(step)
        adapted = self._adapters.update(step.parts)
        self._batch.update(step.parts, step.on_layer)
        try:
            captured = CapturedForward(lambda: self._forward(inputs), self._pool)
        # A RuntimeError is raised if the model needs strides that the kernels' results do not have.
        except (NotCapturable, RuntimeError) as reason:
            # Raises if the step is at fault, not the model. Capture then stays enabled.
            logits = self._run(step)
            self.not_captured = str(reason)
            return logits
        if len(self._captured) >= MAX_CAPTURED:
            del self._captured[self._least_used()]
        self._captured[len(step.token_ids), len(step.rows), adapted] = inputs, captured
        return captured.output

    def _forward(self, inputs: _Inputs) -> torch.Tensor:
        output = self._model(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.rows,
            ragged_batch=self._batch,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _try_capture(self, num_blocks: int) -> None:
        """Runs two different steps of one shape, the second by the captured graph of the first.
        Disables capture if the result is wrong.
        """
        # Every vocabulary has these two token ids.
        first = Step([0, 1], [Part(0, 1, 0, [0]), Part(1, 1, 0, [num_blocks - 1])], [0, 1])
        second = Step([1, 0], [Part(0, 2, 0, [0])], [1, 0])
        self._capture(first)
        if self.not_captured:
            return
        wanted = self._run(second)
        # Functions like exp may differ in the last bit.
        found = self(second)
        atol = 32 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
        if not torch.allclose(found, wanted, rtol=0, atol=atol):
            self.not_captured = "a captured graph does not give what the model gives"
        self._captured.clear()
        self._met.clear()
