"""What stands for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvrelay.engine.attention.flashinfer_attention import FlashInfer, Room
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.forward.capturable import values_unseen
from kvrelay.engine.forward.captured_graph import CapturedForward
from kvrelay.engine.forward.cuda_forward import SCRATCH_BLOCKS, CudaForward, PagedAttention
from kvrelay.engine.forward.cuda_graph import Recorder
from kvrelay.engine.native.program import BufferPool
from kvrelay.engine.runner import ModelRunner


class Rerun:
    """Calls the forward pass again; what it gave before is overwritten."""

    def __init__(self, forward: Callable[[], torch.Tensor]) -> None:
        self.output = torch.full_like(forward(), float("nan"))
        self._forward = forward
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self._forward())


class Reruns:
    def __init__(self) -> None:
        self.graphs: list[Rerun] = []

    def record(self, forward: Callable[[], torch.Tensor]) -> Rerun:
        self.graphs.append(Rerun(forward))
        return self.graphs[-1]


class Program:
    """Calls the operators of one run again, as a CUDA graph does its kernels: what Python found out
    then is fixed.
    """

    def __init__(self, captured: CapturedForward) -> None:
        self._captured = captured
        self.output = captured.output

    def replay(self) -> None:
        self._captured.run()


class Programs:
    def __init__(self) -> None:
        self._pool = BufferPool()

    def record(self, forward: Callable[[], torch.Tensor]) -> Program:
        forward()
        with values_unseen():
            forward()
        return Program(CapturedForward(forward, self._pool))


ROOM = Room(query_heads=8, processors=4, sequences=8, blocks=512)


def cuda_forward_runner(
    folder: Path,
    recorder: Recorder,
    attention: Callable[[KvPool], PagedAttention] = lambda kv: FlashInfer(kv, ROOM),
    *,
    capture: int = 8,
    **options: Any,
) -> tuple[ModelRunner, CudaForward]:
    """A runner on the CPU that computes as one on a GPU does; blocks of 4 tokens, of which the last
    is nobody's. Decode steps of up to `capture` sequences are captured.
    """
    runner = ModelRunner.load(
        str(folder), kernels="torch", block_size=4, kv_bytes=1 << 20, **options
    )
    model = runner._forward._model
    forward = runner._forward = CudaForward(
        model, runner.kv, runner.max_model_len, attention(runner.kv), recorder
    )
    runner.num_blocks -= SCRATCH_BLOCKS
    if capture:
        runner.capture_decode_steps(capture, 0)
    return runner, forward
