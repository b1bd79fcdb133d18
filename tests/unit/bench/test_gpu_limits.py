"""The GPU's measurements, on a CPU: the rates are of the same kind."""

from __future__ import annotations

import torch

from kvrelay.bench.gpu_limits import Sizes, _seconds, measure_gpu_limits


def test_rates_and_bandwidth() -> None:
    limits = measure_gpu_limits(torch.device("cpu"), 1, Sizes(((32, 64, 64),), 2**20, 0.003))
    assert {"float32", "bfloat16"} <= limits.matrix_rates.keys()
    # A processor multiplies more than one pair in a microsecond, and memory moves more than a
    # megabyte in a second.
    assert all(rate > 1e6 for rate in limits.matrix_rates.values())
    assert limits.bandwidth > 1e6


def test_calls_are_timed_in_tries_that_are_long_enough() -> None:
    calls = []
    assert 0 < _seconds(lambda: calls.append(None), torch.device("cpu"), 0.003) < 0.001
    assert len(calls) > 3
