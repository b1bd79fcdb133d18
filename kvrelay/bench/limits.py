"""The limits of a processor, measured rather than looked up."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

# Least duration of a measurement, over all its tries; the best try counts.
_LEAST_SECONDS = 0.15
_TRIES = 3
_STREAM_BYTES = (256 * 2**20, 512 * 2**20, 1024 * 2**20)
# A stream is at least this many times as large as the last-level cache.
_CACHE_SHARE = 4
# Rows, columns and depth of the matrix products: a prompt chunk multiplied by weights, and larger
# square products.
_PRODUCTS = ((512, 2816, 1024), (512, 1024, 2816), (1024, 1024, 1024), (1024, 4096, 4096))


@dataclass(frozen=True, slots=True)
class Limits:
    """matrix_rates: by dtype, floating-point (or integer) operations per second; a multiply-add
    counts as two. Only dtypes that torch can multiply on this machine are included. bandwidth:
    bytes per second of sequential reads from memory.
    """

    # Threads of the host.
    threads: int
    matrix_rates: dict[str, float]
    bandwidth: float

    def matrix_rate(self, dtype: str) -> float:
        """Returns the rate of `dtype`, or that of float32 if it is higher or the only one: a kernel
        can convert narrower numbers. float16 is assumed to run at the rate of bfloat16.
        """
        dtype = "bfloat16" if dtype == "float16" else dtype
        rates = self.matrix_rates
        return max(rates.get(dtype, 0.0), rates["float32"])

    def best(self, other: Limits) -> Limits:
        """Returns the higher figures of two measurements of the same cores. Interference can only
        lower a measurement.
        """
        rates = {
            dtype: max(rate, other.matrix_rates[dtype]) for dtype, rate in self.matrix_rates.items()
        }
        return Limits(self.threads, rates, max(self.bandwidth, other.bandwidth))


def measure_limits(threads: int, *, quick: bool = False) -> Limits:
    """Measures this machine, which takes some seconds. Sets torch's threads for the whole
    process.
    """
    torch.set_num_threads(threads)
    products = _PRODUCTS[:1] if quick else _PRODUCTS
    rates = {}
    for dtype in ("float32", "bfloat16", "int8"):
        best = max(
            (rate for shape in products for rate in _matrix_rates(dtype, *shape)), default=None
        )
        if best is not None:
            rates[dtype] = best
    sizes = _STREAM_BYTES[:1] if quick else _STREAM_BYTES
    least = _CACHE_SHARE * _last_level_cache_bytes()
    return Limits(threads, rates, max(_read_rate(max(size, least)) for size in sizes))


@torch.inference_mode()
def _matrix_rates(dtype: str, rows: int, columns: int, depth: int) -> list[float]:
    """Returns the rate of each method by which torch multiplies this dtype; empty if torch
    cannot.
    """
    ways: list[Callable[[], object]] = []
    if dtype == "int8":
        a = torch.randint(-127, 127, (rows, depth), dtype=torch.int8)
        b = torch.randint(-127, 127, (columns, depth), dtype=torch.int8).t()
        ways.append(lambda: torch._int_mm(a, b))
    else:
        x = torch.randn(rows, depth, dtype=getattr(torch, dtype))
        weight = torch.randn(columns, depth, dtype=getattr(torch, dtype))
        ways.append(lambda: torch.nn.functional.linear(x, weight))
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            # Packed weights need kernels that not every processor has for every dtype.
            with contextlib.suppress(RuntimeError):
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
                ways.append(
                    partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
                )
    rates = []
    for way in ways:
        try:
            way()
        except RuntimeError:
            # torch raises this for a dtype for which this machine has no kernel.
            continue
        rates.append(2 * rows * columns * depth / _seconds(way))
    return rates


def _read_rate(size: int) -> float:
    """Returns bytes per second of the fastest of several reductions over `size` bytes. The bytes
    lie on huge pages if possible.
    """
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    matrix = values.view(-1, 1024)
    vector = torch.ones(1024)
    ways: tuple[Callable[[], object], ...] = (
        values.sum,
        values.amax,
        lambda: torch.dot(values, values),
        lambda: torch.mv(matrix, vector),
    )
    return size / min(map(_seconds, ways))


def _seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of one call: the best of several tries, each long enough to measure."""
    best = float("inf")
    for _ in range(_TRIES):
        calls = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < _LEAST_SECONDS / _TRIES or not calls:
            work()
            calls += 1
        best = min(best, elapsed / calls)
    return best


def _last_level_cache_bytes() -> int:
    """Returns 0 if the kernel does not report the size."""
    sizes = [
        int(text.removesuffix("K")) * 1024
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := file.read_text().strip()).endswith("K")
    ]
    return max(sizes, default=0)
