"""The limits of a GPU, measured rather than looked up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kvrelay.bench.limits import Limits

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """products: rows, columns and depth of each matrix product. read_bytes: size of the stream,
    many times the last-level cache.
    """

    products: tuple[tuple[int, int, int], ...]
    read_bytes: int
    # Least duration of one measurement.
    seconds: float


FULL = Sizes(((4096, 14336, 4096), (8192, 8192, 8192), (16384, 8192, 8192)), 4 * 2**30, 0.3)
QUICK = Sizes(((4096, 14336, 4096),), 2**30, 0.1)


@torch.inference_mode()
def measure_gpu_limits(device: torch.device, threads: int, sizes: Sizes) -> Limits:
    """Measures matrix rates and memory bandwidth. Frees the memory that it used. float32 is
    measured with torch's default: without TF32.
    """
    rates = {}
    for dtype in ("float32", "bfloat16", "int8"):
        best = max(
            (_matrix_rate(device, dtype, shape, sizes.seconds) for shape in sizes.products),
            default=0.0,
        )
        if best:
            rates[dtype] = best
    bandwidth = _read_rate(device, sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Limits(threads, rates, bandwidth)


def _matrix_rate(
    device: torch.device, dtype: str, shape: tuple[int, int, int], seconds: float
) -> float:
    """Returns operations per second, or 0 if torch cannot multiply this dtype on the device."""
    rows, columns, depth = shape
    way: Callable[[], object]
    if dtype == "int8":
        a = torch.randint(-127, 127, (rows, depth), dtype=torch.int8, device=device)
        b = torch.randint(-127, 127, (columns, depth), dtype=torch.int8, device=device)
        way = lambda: torch._int_mm(a, b.t())  # noqa: E731
    else:
        x = torch.randn(rows, depth, dtype=getattr(torch, dtype), device=device)
        weight = torch.randn(columns, depth, dtype=getattr(torch, dtype), device=device)
        way = lambda: linear(x, weight)  # noqa: E731
    try:
        way()
    except RuntimeError:
        # torch raises this for a dtype for which the device has no kernel.
        return 0.0
    return 2 * rows * columns * depth / _seconds(way, device, seconds)


def _read_rate(device: torch.device, sizes: Sizes) -> float:
    """Returns bytes per second of the fastest of several reductions."""
    values = torch.ones(sizes.read_bytes // 4, dtype=torch.float32, device=device)
    matrix = values.view(-1, 1024)
    vector = torch.ones(1024, device=device)
    ways: tuple[Callable[[], object], ...] = (
        values.sum,
        values.amax,
        lambda: torch.mv(matrix, vector),
    )
    return values.nbytes / min(_seconds(way, device, sizes.seconds) for way in ways)


def _seconds(work: Callable[[], object], device: torch.device, at_least: float) -> float:
    """Returns the seconds of one call, the best of several tries. All calls of a try are enqueued
    together, so the device never waits for the host, and the try synchronises once at its end.
    """
    calls = 1
    best = float("inf")
    tries = 0
    while tries < _TRIES:
        _synchronise(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronise(device)
        elapsed = time.perf_counter() - started
        if elapsed < at_least / _TRIES:
            calls *= 2
        else:
            best = min(best, elapsed / calls)
            tries += 1
    return best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
