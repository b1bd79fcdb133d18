"""A forward pass that was recorded once and is started as a whole from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.engine.forward.capturable import NotCapturable, values_unseen


class Graph(Protocol):
    @property
    def output(self) -> torch.Tensor:
        """What the last `replay` computed; the same memory each time."""
        ...

    def replay(self) -> None:
        """Computes from what lies in the memory that the recorded forward pass read. On a GPU it
        does not wait.
        """


class Recorder(Protocol):
    def record(self, forward: Callable[[], torch.Tensor]) -> Graph:
        """`replay` has still to be called. Raises NotCapturable."""
        ...


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Records on a stream of its own, into memory that all its graphs share: they run one after the
    other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Callable[[], torch.Tensor]) -> CudaGraph:
        """Runs `forward` twice before: libraries choose and allocate on first use, and whoever
        looks at values must be found before a capture fails over it."""
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
            # Other threads, which move KV, may go on calling CUDA meanwhile.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                output = forward()
        except RuntimeError as error:
            raise NotCapturable(f"CUDA cannot capture it: {error}") from error
        return CudaGraph(graph, output)
