"""The fit of step costs, and its measurement on an engine whose costs are known."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.bench.engine_bench import DECODE_STEPS
from kvrelay.bench.profiling import run as profiling
from kvrelay.bench.profiling.fit import fit
from kvrelay.errors import FailedPrecondition

CHUNK = 512
FACTS = {"vocab_size": 100, "model_len": 4096, "kv_tokens": 100_000}


class KnownEngine:
    """Answers at once with the times of known costs, and moves the clock by them."""

    name = "known"

    def __init__(
        self, costs: tuple[float, ...], bend: tuple[int, float], pass_time: Callable[[float], None]
    ) -> None:
        self._prefill, self._decode, self._bend = costs[:3], costs[3:], bend
        self._pass_time = pass_time
        self._batch: list[int] = []

    def prefill(self, prompt: list[int]) -> float:
        tokens = len(prompt)
        parts = (-(-tokens // CHUNK), tokens, tokens * (tokens + 1) / 2)
        seconds = sum(cost * part for cost, part in zip(self._prefill, parts, strict=True))
        self._pass_time(seconds)
        return seconds

    def open(self, prompts: list[list[int]]) -> None:
        self._batch = [len(one) for one in prompts]
        for one in prompts:
            self.prefill(one)

    def decode(self, steps: int) -> float:
        total = 0.0
        for _ in range(steps):
            parts = (1, len(self._batch), sum(self._batch))
            total += sum(cost * part for cost, part in zip(self._decode, parts, strict=True))
            total += self._bend[1] * max(0, len(self._batch) - self._bend[0])
            self._batch = [one + 1 for one in self._batch]
        self._pass_time(total)
        return total

    def close(self) -> None:
        self._batch = []


def measured(
    monkeypatch: pytest.MonkeyPatch,
    costs: tuple[float, ...],
    seconds: float,
    bend: tuple[int, float] = (1, 0.0),
) -> tuple[tuple[float, ...], dict[int, float], float]:
    """Returns the fitted costs, the bends, and the seconds that measuring took."""
    now = [0.0]
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])

    def pass_time(more: float) -> None:
        now[0] += more

    options = profiling.Options("known", seconds=seconds, chunk_tokens=CHUNK)
    steps = profiling._Steps(KnownEngine(costs, bend, pass_time), options, dict[str, Any](FACTS))
    prefill = steps.prefill(lambda: None)
    decode, bends = steps.decode(prefill, lambda: None)
    more = decode.coefficients[3:]
    found = {at: one for at, one in zip(bends, more, strict=True) if one > 1e-9}
    return (*prefill.coefficients, *decode.coefficients[:3]), found, now[0]


@pytest.mark.parametrize("slowness", [1e-2, 1.0, 10.0])
def test_known_costs_are_found_within_the_time(
    monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    costs = tuple(slowness * one for one in (4e-3, 6e-5, 1e-8, 1.2e-2, 2e-4, 4e-7))
    found, bends, seconds = measured(monkeypatch, costs, 60.0)
    assert found == pytest.approx(costs, rel=0.02)
    assert bends == {}
    assert seconds < 90.0
    assert DECODE_STEPS > 1


@pytest.mark.parametrize("batch", [2, 4, 8, 16])
def test_a_known_bend_is_found(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    costs = (4e-3, 6e-5, 1e-8, 1.2e-2, 2e-4, 4e-7)
    found, bends, _ = measured(monkeypatch, costs, 60.0, (batch, 3e-4))
    assert found == pytest.approx(costs, rel=0.02)
    assert bends == pytest.approx({batch: 3e-4}, rel=0.02)


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.0, 3.0])
def test_a_slow_machine_has_fewer_bends_than_measurements(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    costs = (4e-2, 6e-4, 1e-7, 1.2e-1, 2e-3, 4e-6)
    found, bends, _ = measured(monkeypatch, costs, seconds, (4, 3e-3))
    assert found[:4] == pytest.approx(costs[:4], rel=0.1)
    assert set(bends) <= {2, 4}


@pytest.mark.parametrize(
    ("batches", "bends"),
    [
        ([1, 4, 1, 4], ()),
        ([1, 4, 1, 4, 2], (2,)),
        ([1, 2, 4, 8, 16], (2,)),
        ([1, 2, 4, 8, 16, 32], (2, 4)),
    ],
)
def test_a_fit_has_a_measurement_more_than_coefficients(
    batches: list[int], bends: tuple[int, ...]
) -> None:
    assert profiling._bends(batches) == bends


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1) | st.just(0.0), min_size=3, max_size=3), st.integers(0, 2**20))
def test_the_fit_finds_coefficients_without_noise(costs: list[float], seed: int) -> None:
    random = Random(seed)
    rows = [(1.0, random.uniform(1, 9), random.uniform(1, 99)) for _ in range(12)]
    seconds = [sum(a * b for a, b in zip(costs, row, strict=True)) for row in rows]
    if min(seconds) <= 1e-6:
        return
    # Of two fits whose squares differ by less than 1e-12, the one with fewer coefficients counts.
    assert fit(rows, seconds, "x").coefficients == pytest.approx(costs, abs=1e-5, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20))
def test_no_other_coefficients_fit_better(seed: int) -> None:
    random = Random(seed)
    rows = [(1.0, random.uniform(1, 9), random.uniform(1, 9)) for _ in range(8)]
    seconds = [random.uniform(0.1, 10) for _ in rows]
    found = fit(rows, seconds, "x")
    assert min(found.coefficients) >= 0
    relative = np.array(rows) / np.array(seconds)[:, None]

    def error(costs: tuple[float, ...]) -> float:
        return float(((relative @ np.array(costs) - 1) ** 2).sum())

    least = error(found.coefficients)
    assert found.rms == pytest.approx((least / len(rows)) ** 0.5)
    for _ in range(50):
        other = tuple(max(0.0, one + random.gauss(0, 0.1)) for one in found.coefficients)
        assert error(other) >= least - 1e-9


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 2.0)],
        [(1.0, 2.0), (1.0, 2.0)],
        # Met exactly by two coefficients, so that the error would be 0.
        [(1.0, 2.0), (1.0, 3.0)],
    ],
)
def test_too_few_measurements_are_refused(rows: list[tuple[float, float]]) -> None:
    with pytest.raises(FailedPrecondition, match="do not determine"):
        fit(rows, [1.0] * len(rows), "decode")
