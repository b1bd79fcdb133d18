"""A forward pass that is captured once in a CUDA graph and then launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.engine.forward.capturable import NotCapturable, values_unseen


class Graph(Protocol):
    """A captured forward pass."""

    @property
    def output(self) -> torch.Tensor:
        """The result of the last `replay`, in the same memory each time."""
        ...

    def replay(self) -> None:
        """Computes from the current values in the memory that the captured pass read. On a GPU it
        does not wait.
        """


class Recorder(Protocol):
    """Captures forward passes."""

    def record(self, forward: Callable[[], torch.Tensor]) -> Graph:
        """Captures `forward` without a replay. Raises NotCapturable."""
        ...


class CudaGraph:
    """A captured CUDA graph and its output tensor."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        """Launches the graph on the current stream without waiting."""
        self._graph.replay()


class CudaGraphs:
    """Captures graphs on its own stream. All graphs share memory, since they run one after
    another.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Callable[[], torch.Tensor]) -> CudaGraph:
        """Captures `forward`. Raises NotCapturable.

        Runs `forward` twice first: libraries choose algorithms and allocate on first use, and reads
        of values must be found before they make a capture fail.
        """
        asking = torch.cuda.current_stream()
        self._stream.wait_stream(asking)
        try:
            with torch.cuda.stream(self._stream):
                forward()
                with values_unseen():
                    forward()
                return self._capture(forward)
        finally:
            asking.wait_stream(self._stream)

    def _capture(self, forward: Callable[[], torch.Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads that move KV may call CUDA during the capture.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                output = forward()
        except RuntimeError as error:
            raise NotCapturable(f"CUDA cannot capture the forward pass: {error}") from error
        return CudaGraph(graph, output)
