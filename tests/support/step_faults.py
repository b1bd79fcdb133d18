"""Faults of single sequences in the steps of real engines. A sequence is marked by the first token
of its prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch

from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment

Kind = Literal["raise", "raise late", "out of memory", "nan", "one nan", "inf", "-inf", "hang"]
RAISED: tuple[Kind, ...] = ("raise", "raise late", "out of memory")
LOGITS: tuple[Kind, ...] = ("nan", "one nan", "inf", "-inf")


@dataclass
class StepFaults:
    """What goes wrong in steps with a marked sequence, from its n-th token on; `seen` counts them
    by kind.

    "raise" happens before the model runs, "raise late" when the whole step's KV is stored.
    """

    # First prompt token -> (kind, n)
    marks: dict[int, tuple[Kind, int]] = field(default_factory=dict)
    fewest: int = 1  # sequences of a step that goes wrong
    seen: dict[Kind, int] = field(default_factory=dict)
    # Number of sequences of each step, and of each step with a prompt.
    steps: list[int] = field(default_factory=list)
    prompt_steps: list[int] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> StepFaults:
        """Into all runners of this process."""
        logits_of = ModelRunner._logits

        def faulty(
            runner: ModelRunner,
            segments: Sequence[Segment],
            rows: Sequence[int],
            on_layer: OnLayer | None,
        ) -> torch.Tensor:
            self.steps.append(len(segments))
            if any(one.sample is None or not one.sample.num_output for one in segments):
                self.prompt_steps.append(len(segments))
            kinds = [self._kind(segment) for segment in segments]
            for kind in kinds:
                if kind is not None and len(segments) >= self.fewest:
                    self.seen[kind] = self.seen.get(kind, 0) + 1
                    self._before(kind)
            logits = logits_of(runner, segments, rows, on_layer)
            if "raise late" in kinds and len(segments) >= self.fewest:
                raise RuntimeError("the device is unwell")
            return self._spoilt(logits, segments, kinds)

        monkeypatch.setattr(ModelRunner, "_logits", faulty)
        return self

    def _kind(self, segment: Segment) -> Kind | None:
        """Chunks that nothing is drawn from are known by their own first token."""
        sample = segment.sample
        if sample is None:
            kind, at = self.marks.get(segment.token_ids[0], (None, 0))
            return kind if at == 0 else None
        kind, at = self.marks.get(sample.token_ids[0], (None, 0))
        return kind if sample.num_output - segment.num_draft >= at else None

    def _before(self, kind: Kind) -> None:
        if kind == "raise":
            raise RuntimeError("the device is unwell")
        if kind == "out of memory":
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        if kind == "hang":
            self.hanging.set()
            self.released.wait()

    @staticmethod
    def _spoilt(
        logits: torch.Tensor, segments: Sequence[Segment], kinds: Sequence[Kind | None]
    ) -> torch.Tensor:
        owners = [
            kind for segment, kind in zip(segments, kinds, strict=True) for _ in segment.draws
        ]
        logits = logits.clone()
        for row, kind in enumerate(owners):
            match kind:
                case "nan":
                    logits[row] = torch.nan
                case "one nan":
                    logits[row, -1] = torch.nan
                case "inf":
                    logits[row, 5] = torch.inf
                case "-inf":
                    logits[row] = -torch.inf
        return logits
