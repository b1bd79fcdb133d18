from __future__ import annotations

import torch

from kvrelay.bench.limits import Limits, measure_limits


def test_what_is_measured_is_a_rate_for_each_dtype() -> None:
    limits = measure_limits(torch.get_num_threads(), quick=True)
    assert {"float32", "bfloat16"} <= limits.matrix_rates.keys()
    # A processor multiplies more than one pair in a microsecond, and memory moves more than a
    # megabyte in a second.
    assert all(rate > 1e6 for rate in limits.matrix_rates.values())
    assert limits.bandwidth > 1e6


def test_the_better_of_two_measurements_counts() -> None:
    one = Limits(1, {"float32": 1.0, "bfloat16": 4.0}, bandwidth=2.0)
    other = Limits(1, {"float32": 2.0, "bfloat16": 3.0}, bandwidth=1.0)
    assert one.best(other) == Limits(1, {"float32": 2.0, "bfloat16": 4.0}, bandwidth=2.0)


def test_a_dtype_without_a_rate_runs_as_another() -> None:
    limits = Limits(1, {"float32": 1.0, "bfloat16": 4.0}, bandwidth=1.0)
    assert limits.matrix_rate("float16") == 4.0
    assert limits.matrix_rate("int8") == 1.0
    # A processor without products of bfloat16.
    assert Limits(1, {"float32": 2.0, "bfloat16": 0.5}, 1.0).matrix_rate("bfloat16") == 2.0
