from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from autoscaler.queueing_model import Requests
from kvrelay.loadtest.lengths import LogNormal, Uniform
from kvrelay.loadtest.traces.trace_load import read_load, span

EXACT = Uniform(100, 100), Uniform(10, 10)


def test_requests_are_counted_by_interval(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    times = ("00.0", "01.0", "05.0")
    rows = "".join(f"2023-11-16 18:15:{at},{100 * n},{n}\n" for n, at in enumerate(times, 1))
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert list(read_load(file, 2.0, *EXACT)) == [
        Requests(2, 300, 3),
        Requests(0, 0, 0),
        Requests(1, 300, 3),
    ]
    assert span(file, *EXACT) == 5.0


def test_servegens_rates_are_expected_load(tmp_path: Path) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,2,1,Gamma,1,1\n600,4,1,,0,0\n")
    (tmp_path / "chunk-2-trace.csv").write_text("600,1,1,,0,0\n")
    lengths = '{"0": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{5: 1}"}}'
    (tmp_path / "chunk-2-dataset.json").write_text(lengths)
    loads = list(read_load(tmp_path, 600.0, *EXACT))
    assert loads == [
        Requests(1200, 120_000, 12_000),
        Requests(3000, 240_000 + 12_000, 24_000 + 3000),
    ]
    assert span(tmp_path, *EXACT) == 1200.0


@pytest.mark.parametrize("interval", [7.0, 500.0, 600.0, 5000.0])
def test_expected_load_includes_the_partial_interval_at_the_end(
    tmp_path: Path, interval: float
) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,2,1,,0,0\n600,2,1,,0,0\n")
    loads = list(read_load(tmp_path, interval, *EXACT))
    assert len(loads) == math.ceil(1200 / interval)
    assert sum(load.number for load in loads) == pytest.approx(2 * 1200)


@pytest.mark.parametrize(
    "lengths", [Uniform(3, 8), LogNormal(400, 0.8, 32, 2048), LogNormal(50, 0.0, 10, 20)]
)
def test_the_mean_of_lengths_is_that_of_many_draws(lengths: Uniform | LogNormal) -> None:
    random = Random(7)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert lengths.mean == pytest.approx(math.fsum(drawn) / len(drawn), rel=0.02)
